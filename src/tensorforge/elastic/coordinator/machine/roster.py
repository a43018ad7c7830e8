"""The workers that the coordinator knows: members in order of rank, joiners in order of arrival, leavers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tensorforge.cluster.workers import WORKER_LIFECYCLE, WorkerId, WorkerStatus
from tensorforge.elastic.coordinator.journal_records import Seat
from tensorforge.elastic.protocol.messages import Progress
from tensorforge.elastic.protocol.reasons import Departure


@dataclass(slots=True)
class Participant:
    """One worker process, as the coordinator knows it.

    `known_generation` is the newest generation that was sent on its present stream. `connection` is `None` for
    a member that a restarted coordinator waits for. `leave_reason` is set once the worker is to leave.
    """

    worker: WorkerId
    incarnation: str
    joined_at: float
    last_seen: float
    connection: int | None = None
    status: WorkerStatus = WorkerStatus.JOINING
    attributes: dict[str, str] = field(default_factory=dict)
    known_generation: int | None = None
    progress: Progress | None = None
    leave_reason: Departure | None = None
    finished: bool = False

    @property
    def id(self) -> str:
        """The worker's name."""
        return self.worker.id

    @property
    def is_leaving(self) -> bool:
        """Whether the worker asked, or was asked, to leave."""
        return self.leave_reason is not None

    @property
    def seat(self) -> Seat:
        """The worker and its process, as the journal names them."""
        known = self.attributes
        return Seat(self.worker, self.incarnation, known.get("pid"), known.get("process"))

    def transition(self, status: WorkerStatus) -> None:
        """Change the status as the lifecycle allows; the same status changes nothing."""
        if status is not self.status:
            self.status = WORKER_LIFECYCLE.require(self.status, status)


class Roster:
    """All workers by name and by stream. `members` is the current generation, `waiting` are the joiners."""

    def __init__(self) -> None:
        self._by_id: dict[str, Participant] = {}
        self._by_connection: dict[int, Participant] = {}
        self.members: tuple[WorkerId, ...] = ()
        self._member_ids: dict[str, None] = {}
        self.waiting: dict[str, Participant] = {}

    def __iter__(self) -> Iterator[Participant]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, worker_id: str) -> Participant | None:
        """The worker of that name."""
        return self._by_id.get(worker_id)

    def by_connection(self, connection: int) -> Participant | None:
        """The worker whose stream this is."""
        return self._by_connection.get(connection)

    def is_member(self, worker_id: str) -> bool:
        """Whether the worker is a member of the current generation."""
        return worker_id in self._member_ids

    def add(self, participant: Participant) -> None:
        """Add a newcomer; it waits until a generation includes it."""
        self._by_id[participant.id] = participant
        self.waiting[participant.id] = participant
        if participant.connection is not None:
            self._by_connection[participant.connection] = participant

    def seat_members(self, members: tuple[WorkerId, ...]) -> None:
        """Make these the members of the current generation."""
        self.members = members
        self._member_ids = {worker.id: None for worker in members}
        for worker in members:
            self.waiting.pop(worker.id, None)

    def connect(self, participant: Participant, connection: int) -> int | None:
        """Give the worker a new stream and return the old one."""
        old = participant.connection
        if old is not None:
            self._by_connection.pop(old, None)
        participant.connection = connection
        participant.known_generation = None
        self._by_connection[connection] = participant
        return old

    def drop(self, participant: Participant) -> int | None:
        """Forget the worker and return its stream. The members change only with the next generation."""
        self._by_id.pop(participant.id, None)
        self.waiting.pop(participant.id, None)
        if participant.connection is not None:
            self._by_connection.pop(participant.connection, None)
        return participant.connection

    def present_members(self) -> list[Participant]:
        """Members that are still here, in order of rank, leavers included.

        A newcomer with the name of a lost member is not that member.
        """
        found = (self._by_id.get(worker.id) for worker in self.members)
        return [p for p in found if p is not None and p.id not in self.waiting]

    def leavers(self) -> list[Participant]:
        """Workers that are leaving and are not members any more."""
        return [p for p in self._by_id.values() if p.is_leaving and not self.is_member(p.id)]


def arrange(
    members: tuple[WorkerId, ...], staying: set[str], newcomers: tuple[WorkerId, ...]
) -> tuple[WorkerId, ...]:
    """The next members in order of rank.

    A newcomer takes the rank of a worker that left, so that the others keep theirs. Ranks that nobody takes are
    closed up; newcomers without a free rank come last. Those who stay keep their order.
    """
    fresh = iter(newcomers)
    ranks: list[WorkerId] = []
    for worker in members:
        if worker.id in staying:
            ranks.append(worker)
            continue
        replacement = next(fresh, None)
        if replacement is not None:
            ranks.append(replacement)
    return (*ranks, *fresh)
