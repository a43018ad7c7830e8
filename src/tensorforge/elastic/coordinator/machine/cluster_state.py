"""The state of the coordinator's machine: who is here, which generation it is, and how far that has come."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.cluster.workers import WorkerStatus
from tensorforge.elastic.coordinator.journal_records import DurableState, WasCommitted
from tensorforge.elastic.coordinator.machine.barrier import Barrier
from tensorforge.elastic.coordinator.machine.instructions import InstructionList
from tensorforge.elastic.coordinator.machine.open_groups import OpenGroups
from tensorforge.elastic.coordinator.machine.rescale_log import RescaleLog
from tensorforge.elastic.coordinator.machine.rescale_policy import (
    Tolerance,
    check_target,
    worker_limit,
)
from tensorforge.elastic.coordinator.machine.roster import Participant, Roster
from tensorforge.elastic.protocol import messages
from tensorforge.elastic.protocol.reasons import Departure, DepartureKind
from tensorforge.elastic.protocol.timeouts import Timeouts


class Phase(Enum):
    """What the cluster is doing."""

    GATHERING = "gathering"
    """No generation exists yet; workers join."""
    RESCALING = "rescaling"
    """A generation was decided; its members have to stop."""
    FORMING = "forming"
    """All members have stopped; they form the new group."""
    ACTIVE = "active"
    """All members have formed and train."""
    PAUSED = "paused"
    """Too few members, or an earlier group may still be training."""
    FINISHING = "finishing"
    """A member has completed the training; the others are to confirm it."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why the next generation must be decided now. `text` is for people."""

    text: str
    evidence_at: float
    is_failure: bool


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A member's collective failed, and nobody is known to be lost; at `due` it counts as a failure."""

    due: float
    text: str


class ClusterState:
    """The data that the machine's parts share and change.

    `restored` is the state that the journal of an earlier coordinator adds up to. `utc_origin` is the UTC
    time, in seconds, at which `now` was 0; it only dates the records.
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
        if desired_workers is not None:
            check_target(config, desired_workers)
        durable = restored or DurableState(history=[])
        self.config = config
        self.timeouts = Timeouts.derive(config)
        self.out = InstructionList()
        self.roster = Roster()
        self.phase = Phase.GATHERING
        self.desired_workers = durable.desired_workers or desired_workers
        self.target_version = durable.target_version
        self.target_by = durable.target_by
        self.target_requester = durable.target_requester
        self.ended = durable.ended
        self.terms = durable.terms
        """The run's terms; before the first generation those of the first worker, not journaled yet."""
        self.tolerance = Tolerance(config)
        self.stale_messages = 0
        self._utc_origin = utc_origin
        # The newest generation, and the last one that formed
        self.generation = durable.generation
        self.formed_generation = durable.formed_generation
        self.formed_seats = frozenset((s.worker.id, s.incarnation) for s in durable.formed_seats)
        self.finishes: dict[tuple[str, str], messages.Finish] = {}
        """What the members of the formed generation said at the end of their training, by seat."""
        self.open_groups = OpenGroups(durable.open_groups)
        self.urgent = durable.urgent
        self.barrier = Barrier()
        self.rescale_log = RescaleLog(durable.history, now)
        self.progress = messages.State()
        self.has_committed = False
        # What the next decision has to react to
        self.causes: list[Cause] = []
        self.removed: dict[str, Departure] = {}
        self.suspicion: Suspicion | None = None
        self.first_join: float | None = None
        self.last_change = now
        # When something is due even if no input comes
        self.silence_at: float | None = None
        self.deadline: float | None = None
        if durable.committed is not None:
            self.take_progress(durable.committed)
        self._restore(durable, now)

    @property
    def limit(self) -> int | None:
        """The most members that the next generation may have."""
        return worker_limit(self.config, self.desired_workers)

    def utc(self, at: float) -> datetime:
        """The moment `at` as a UTC time."""
        return datetime.fromtimestamp(self._utc_origin + at, UTC)

    def staying(self) -> list[Participant]:
        """Members that are here and not leaving, in order of rank."""
        return [p for p in self.roster.present_members() if not p.is_leaving]

    def holds_state(self, who: Participant) -> bool:
        """Whether the worker is a member of the last formed generation, so that it has the run's state."""
        return (who.id, who.incarnation) in self.formed_seats

    def continuing(self) -> list[Participant]:
        """The members that the next generation keeps, in order of rank.

        These are the ones that stay. If none of them has the run's state, leaving members that have it are kept
        for one more generation, in which the others get the state from them.
        """
        staying = self.staying()
        if any(self.holds_state(p) for p in staying) or not (staying or self.next_in_line()):
            return staying
        present = self.roster.present_members()
        return [p for p in present if not p.is_leaving or self.holds_state(p)]

    def next_in_line(self) -> list[Participant]:
        """The waiting workers that the next generation has room for, in order of arrival."""
        return list(self.roster.waiting.values())[: self.room()]

    def room(self) -> int | None:
        """How many newcomers the next generation has room for; `None` for any number."""
        return None if self.limit is None else max(0, self.limit - len(self.staying()))

    def watch_silence(self, now: float) -> None:
        """Set the deadline at which silent workers are looked for, unless it is set."""
        if self.silence_at is None:
            self.silence_at = now + self.timeouts.silence

    def open_barrier(self, now: float, *, paused: bool) -> None:
        """Wait for the answer of every member, until the deadline of the barrier or of the pause."""
        self.barrier = Barrier()
        self.has_committed = False
        self.suspicion = None
        if not paused:
            self.phase, self.deadline = Phase.RESCALING, now + self.timeouts.barrier
        elif self.phase is not Phase.PAUSED:
            self.phase, self.deadline = Phase.PAUSED, now + self.timeouts.pause

    def take_progress(self, step: messages.Progress | WasCommitted) -> None:
        """Remember this committed step as the newest one."""
        self.progress = messages.State(
            epoch=step.epoch,
            step=step.step,
            learning_rate=step.learning_rate,
            samples=step.samples,
            global_batch_size=step.global_batch_size,
        )

    def departure(self, kind: DepartureKind, who: Participant, **facts: Any) -> Departure:
        """Why this worker leaves, with the present version of the target."""
        version = self.target_version
        return Departure(kind=kind, worker=who.id, target_version=version, **facts)

    def ignores(self, who: Participant, generation: int) -> bool:
        """Whether `generation` is not the newest one; then the sender of the message is told so."""
        if generation == self.generation:
            return False
        self.stale_messages += 1
        why = f"generation {generation} is not {self.generation}, the current one"
        if who.connection is not None:
            self.out.send((who.connection,), messages.Stale(reason=why))
        self.out.note("info", f"{who.id}: a message was ignored: {why}")
        return True

    def _restore(self, durable: DurableState, now: float) -> None:
        if durable.ended is not None:
            self.phase = Phase.ENDED
        elif durable.seats or durable.paused:
            self._restore_members(durable, now)

    def _restore_members(self, durable: DurableState, now: float) -> None:
        """Make those whom the journal names members; each has until `comeback` to connect."""
        is_formed = durable.formed_generation == durable.generation
        finishes = {(f.seat.worker.id, f.seat.incarnation): f for f in durable.finishes}
        expected = now + self.timeouts.comeback - self.timeouts.silence
        for seat in durable.seats:
            member = Participant(seat.worker, seat.incarnation, now, last_seen=expected)
            told = {"pid": seat.pid, "process": seat.process}
            member.attributes = {name: value for name, value in told.items() if value is not None}
            member.status = WorkerStatus.ACTIVE if is_formed else WorkerStatus.RESCALING
            member.finished = (member.id, member.incarnation) in finishes
            self.roster.add(member)
        self.roster.seat_members(tuple(seat.worker for seat in durable.seats))
        self.tolerance.expect(len(durable.seats))
        self.silence_at = now + self.timeouts.comeback
        self.finishes = {name: finish.message for name, finish in finishes.items()}
        if finishes:
            self.phase, self.deadline = Phase.FINISHING, now + self.timeouts.barrier
            return
        if not is_formed:
            self.open_barrier(now, paused=durable.paused)
            return
        self.phase = Phase.ACTIVE
        committed = durable.committed
        self.has_committed = committed is not None and committed.generation == durable.generation
