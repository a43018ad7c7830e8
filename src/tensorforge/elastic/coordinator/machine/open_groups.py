"""Which groups may still be committing steps, and what proves that one of them cannot.

A step is committed by all members of a generation or by none. So a group of which one member has stopped for
good is over, whatever the others do. The next generation may begin only when every earlier group is over;
otherwise a group that the coordinator merely cannot see (a network cut) and the one that replaces it could both
train the same run. No clock decides it, so a group that is cut off may train on for as long as it likes.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensorforge.cluster.workers import WorkerId
from tensorforge.elastic.coordinator.journal_records import OpenGroup, Seat


class OpenGroups:
    """The groups that may be training, as far as is known: at most one while nobody was restarted.

    A group is over when one of its members is known to have stopped: it stands at a later barrier, its code
    raised, it came back as a newcomer, its process was seen to end, or another one took its name on its host.
    """

    def __init__(self, groups: Iterable[OpenGroup] = ()) -> None:
        self._groups = {group.generation: _by_name(group.seats) for group in groups}

    def begin(self, generation: int, seats: Iterable[Seat]) -> None:
        """This group may train from now on. Its members stand at the barrier, so earlier groups are over."""
        self._groups = {generation: _by_name(seats)}

    def stands_at_barrier(self, seat: Seat, generation: int) -> None:
        """The member trains in no generation before this one any more."""
        self._end_those_with(seat.worker.id, seat.incarnation, before=generation)

    def stopped(self, worker_id: str, incarnation: str) -> None:
        """The process of that name and incarnation trains no more."""
        self._end_those_with(worker_id, incarnation)

    def exited(self, worker_id: str, pid: int | None) -> None:
        """A process of that name was seen to end; if `pid` is given, this one."""
        for generation, seats in list(self._groups.items()):
            seat = seats.get(worker_id)
            if seat is not None and (pid is None or seat.pid in (None, str(pid))):
                del self._groups[generation]

    def name_taken(self, worker: WorkerId) -> None:
        """A new process has this name.

        On the same host that proves its predecessor gone: whoever could reach us from there now could have
        before. Elsewhere it proves nothing.
        """
        for generation, seats in list(self._groups.items()):
            seat = seats.get(worker.id)
            if seat is not None and seat.worker.hostname == worker.hostname:
                del self._groups[generation]

    def blocked_by(self, seats: Iterable[Seat]) -> int | None:
        """The generation that might go on training beside a new group of these members, if there is one.

        A group does not block its own members: they have to stop before the new one begins.
        """
        candidates = _by_name(seats)
        for generation, group in self._groups.items():
            if not any(
                name in candidates and candidates[name].incarnation == seat.incarnation
                for name, seat in group.items()
            ):
                return generation
        return None

    def _end_those_with(
        self, worker_id: str, incarnation: str, *, before: int | None = None
    ) -> None:
        for generation, seats in list(self._groups.items()):
            seat = seats.get(worker_id)
            is_earlier = before is None or generation < before
            if seat is not None and seat.incarnation == incarnation and is_earlier:
                del self._groups[generation]


def _by_name(seats: Iterable[Seat]) -> dict[str, Seat]:
    return {seat.worker.id: seat for seat in seats}
