"""What the coordinator knows: who is here, which generation it is, and how far that has come."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.cluster.workers import WorkerStatus
from tensorforge.elastic.coordinator.machine.barrier import Barrier
from tensorforge.elastic.coordinator.machine.instructions import Outbox
from tensorforge.elastic.coordinator.machine.journal_records import DurableState, RescaleRecord
from tensorforge.elastic.coordinator.machine.loss_policy import worker_limit
from tensorforge.elastic.coordinator.machine.open_groups import Continuity
from tensorforge.elastic.coordinator.machine.rescale_log import Chronicle
from tensorforge.elastic.coordinator.machine.roster import Participant, Roster
from tensorforge.elastic.coordinator.machine.tolerance import Tolerance
from tensorforge.elastic.protocol import messages
from tensorforge.elastic.protocol.timeouts import Timeouts


class Phase(Enum):
    """What the cluster as a whole is doing."""

    GATHERING = "gathering"
    RESCALING = "rescaling"
    FORMING = "forming"
    ACTIVE = "active"
    PAUSED = "paused"
    FINISHING = "finishing"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why the members must change now."""

    text: str
    evidence_at: float
    is_failure: bool


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A member's group broke, and nobody is known to be lost: what to make of it when `due`."""

    due: float
    text: str


class ClusterState:
    """All that the machine's parts share. They change it; it only keeps itself consistent.

    `restored` is what the journal of an earlier coordinator adds up to.
    """

    def __init__(
        self,
        config: ElasticTrainingConfig,
        *,
        now: float,
        desired_workers: int | None = None,
        restored: DurableState | None = None,
        utc_origin: float = 0.0,
    ) -> None:
        durable = restored or DurableState(history=[])
        self.config = config
        self.timeouts = Timeouts.derive(config)
        self.out = Outbox()
        self.roster = Roster()
        self.phase = Phase.GATHERING
        self.desired_workers = durable.desired_workers or desired_workers
        self.target_version = durable.target_version
        self.target_by = durable.target_by
        self.ended = durable.ended
        self.tolerance = Tolerance(config)
        self.stale_messages = 0
        self._utc_origin = utc_origin
        # The generation at hand, and the last one that formed
        self.generation = durable.generation
        self.formed_generation = durable.formed_generation
        self.formed_seats = frozenset((s.worker.id, s.incarnation) for s in durable.formed_seats)
        self.continuity = Continuity(durable.open_groups)
        self.urgent = durable.urgent
        self.barrier = Barrier()
        self.chronicle = Chronicle(durable.history, now)
        self.progress = _progress(durable)
        self.has_committed = False
        # What the next decision has to react to
        self.causes: list[Cause] = []
        self.gone: dict[str, str] = {}
        self.suspicion: Suspicion | None = None
        self.first_join: float | None = None
        self.last_change = now
        # When something must happen by itself
        self.silence_at: float | None = None
        self.deadline: float | None = None
        self._restore(durable, now)

    @property
    def limit(self) -> int | None:
        """The most members that the next generation may have."""
        return worker_limit(self.config, self.desired_workers)

    @property
    def history(self) -> list[RescaleRecord]:
        """The rescales, newest last."""
        return self.chronicle.history

    @property
    def refusals(self) -> int:
        """How many streams were refused."""
        return self.out.refusals

    def utc(self, at: float) -> datetime:
        """The time as people read it."""
        return datetime.fromtimestamp(self._utc_origin + at, UTC)

    def staying(self) -> list[Participant]:
        """Members that are here and do not want to go, in order of rank."""
        return [p for p in self.roster.present_members() if not p.is_leaving]

    def next_in_line(self) -> list[Participant]:
        """Those who wait and whom the next generation can take, in order of arrival."""
        return list(self.roster.waiting.values())[: self.room()]

    def room(self) -> int | None:
        """How many newcomers the next generation can take; `None` for any number."""
        return None if self.limit is None else max(0, self.limit - len(self.staying()))

    def watch_silence(self, now: float) -> None:
        """Make sure that somebody who falls silent is noticed."""
        if self.silence_at is None:
            self.silence_at = now + self.timeouts.silence

    def open_barrier(self, now: float, *, paused: bool) -> None:
        """Wait for every member's answer: until the barrier's deadline, or that of the pause."""
        self.barrier = Barrier()
        self.has_committed = False
        self.suspicion = None
        if not paused:
            self.phase, self.deadline = Phase.RESCALING, now + self.timeouts.barrier
        elif self.phase is not Phase.PAUSED:
            self.phase, self.deadline = Phase.PAUSED, now + self.timeouts.pause

    def ignores(self, who: Participant, generation: int) -> bool:
        """Whether a message about `generation` must be ignored; its sender is told."""
        if generation == self.generation:
            return False
        self.stale_messages += 1
        why = f"generation {generation} is not {self.generation}, the current one"
        if who.connection is not None:
            stale = messages.Stale(generation=self.generation, reason=why)
            self.out.send((who.connection,), stale)
        self.out.note("info", f"{who.id}: a message was ignored: {why}")
        return True

    def _restore(self, durable: DurableState, now: float) -> None:
        if durable.ended is not None:
            self.phase = Phase.ENDED
        elif durable.seats or durable.paused:
            self._restore_members(durable, now)

    def _restore_members(self, durable: DurableState, now: float) -> None:
        """Seat those that the journal names; they have until `comeback` to show that they live."""
        is_formed = durable.formed_generation == durable.generation
        expected = now + self.timeouts.comeback - self.timeouts.silence
        for seat in durable.seats:
            member = Participant(seat.worker, seat.incarnation, now, last_seen=expected)
            told = {"pid": seat.pid, "process": seat.process}
            member.attributes = {name: value for name, value in told.items() if value is not None}
            member.status = WorkerStatus.ACTIVE if is_formed else WorkerStatus.RESCALING
            self.roster.add(member)
        self.roster.seat_members(tuple(seat.worker for seat in durable.seats))
        self.tolerance.expect(len(durable.seats))
        self.silence_at = now + self.timeouts.comeback
        if not is_formed:
            self.open_barrier(now, paused=durable.paused)
            return
        self.phase = Phase.ACTIVE
        committed = durable.committed
        self.has_committed = committed is not None and committed.generation == durable.generation


def _progress(durable: DurableState) -> messages.State:
    committed = durable.committed
    if committed is None:
        return messages.State()
    return messages.State(
        epoch=committed.epoch,
        step=committed.step,
        learning_rate=committed.learning_rate,
        samples=committed.samples,
        global_batch_size=committed.global_batch_size,
    )
