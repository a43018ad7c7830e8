"""Which groups may still be committing steps, and what proves that a group cannot.

A step is committed by all members of a generation or by none. So a group is over once one of its members
has stopped for good, whatever the others do. The next generation may begin only when every earlier group is
over. Otherwise a group that the coordinator cannot see (a network cut) and the group that replaces it could
both train the same run. No clock is involved, so a group that is cut off may train on without a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tensorforge.cluster.workers import WorkerId
from tensorforge.elastic.coordinator.journal_records import OpenGroup, Seat


class OpenGroups:
    """The groups that may be training. There is at most one unless a coordinator was restarted.

    A group is over when one of its members is known to have stopped: it waits at a later barrier, its code
    raised, it came back as a newcomer, its process was seen to end, or another process took its name on its
    host.
    """

    def __init__(self, groups: Iterable[OpenGroup] = ()) -> None:
        self._groups = {group.generation: _by_name(group.seats) for group in groups}

    def __len__(self) -> int:
        return len(self._groups)

    def begin(self, generation: int, seats: Iterable[Seat]) -> None:
        """This group may train from now on. Its members wait at the barrier, so all earlier groups are over."""
        self._groups = {generation: _by_name(seats)}

    def at_barrier(self, seat: Seat, generation: int) -> None:
        """The member has stopped training in every generation before this one."""
        self._end_if(
            seat.worker.id, lambda g, s: s.incarnation == seat.incarnation and g < generation
        )

    def stopped(self, worker_id: str, incarnation: str) -> None:
        """The process of that name and incarnation has stopped for good."""
        self._end_if(worker_id, lambda _, seat: seat.incarnation == incarnation)

    def exited(self, worker_id: str, pid: int | None) -> None:
        """A process of that name was seen to end; with `pid`, the process of that id."""
        self._end_if(worker_id, lambda _, seat: pid is None or seat.pid in (None, str(pid)))

    def name_reused(self, worker: WorkerId) -> None:
        """A new process has this name.

        On the same host this proves that the earlier process is gone: if it could reach the coordinator from
        there, it would have. On another host it proves nothing.
        """
        self._end_if(worker.id, lambda _, seat: seat.worker.hostname == worker.hostname)

    def blocked_by(self, seats: Iterable[Seat]) -> int | None:
        """The generation that may go on training beside a new group of these members; `None` if there is none.

        A group does not block its own members: they stop before the new group begins.
        """
        candidates = _by_name(seats)
        for generation, group in self._groups.items():
            if not any(
                name in candidates and candidates[name].incarnation == seat.incarnation
                for name, seat in group.items()
            ):
                return generation
        return None

    def _end_if(self, worker_id: str, has_stopped: Callable[[int, Seat], bool]) -> None:
        """Drop the groups in which `has_stopped(generation, seat)` holds for this worker's seat."""
        for generation, seats in list(self._groups.items()):
            if worker_id in seats and has_stopped(generation, seats[worker_id]):
                del self._groups[generation]


def _by_name(seats: Iterable[Seat]) -> dict[str, Seat]:
    return {seat.worker.id: seat for seat in seats}
