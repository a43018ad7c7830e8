"""What a display shows of a run, collected from its events. No terminal, no clock."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.launch.supervisor.events import (
    CheckpointProgress,
    CoordinatorExited,
    CoordinatorStarted,
    Event,
    GenerationFormed,
    StopRequested,
    TargetChanged,
    TrainingFinished,
    TrainingResumed,
    TrainingStopped,
    WorkerExited,
    WorkerJoined,
    WorkerLost,
    WorkerReleased,
    WorkerStarted,
    WorkerUnplaceable,
    WorkerVanished,
)
from tensorforge.launch.supervisor.exit_codes import describe_exit

RATE_SECONDS = 10.0
LOSSES_KEPT = 400
RESCALES_KEPT = 50
GONE_KEPT = 4


@dataclass(slots=True)
class WorkerRow:
    """One worker in the view."""

    name: str
    pid: int | None
    """`None` for a worker that this launcher did not start."""
    state: str
    since: float
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Rescale:
    """One rescale in the view's timeline."""

    at: float
    generation: int
    size: int
    reason: str
    phases: tuple[tuple[str, float], ...]

    @property
    def total(self) -> float:
        """Milliseconds over all phases."""
        return sum(milliseconds for _, milliseconds in self.phases)


@dataclass(slots=True)
class RunView:
    """What is known about the run; only `apply` changes it."""

    target: int = 0
    workers: dict[str, WorkerRow] = field(default_factory=dict)
    generation: int | None = None
    coordinator: str = "starting"
    phase: str = "starting"
    step: int | None = None
    epoch: int = 0
    samples: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES_KEPT))
    rescales: deque[Rescale] = field(default_factory=lambda: deque(maxlen=RESCALES_KEPT))
    checkpoint: CheckpointProgress | None = None
    _rates: deque[tuple[float, int]] = field(default_factory=deque)

    def apply(self, event: Event, now: float) -> None:
        """Update the view with an event; ignore events that it does not show."""
        self._apply_to_workers(event, now)
        match event:
            case CommittedStep():
                self._step(event, now)
            case TrainingResumed(step):
                self.step = step if step >= 0 else None
                self.losses.clear()
            case GenerationFormed():
                self._formed(event, now)
            case CheckpointProgress():
                self.checkpoint = event
            case TargetChanged(workers):
                self.target = workers
            case CoordinatorStarted(address):
                self.coordinator = address
            case CoordinatorExited(code):
                self.coordinator = describe_exit(code)
            case StopRequested():
                self.phase = "stopping"
            case TrainingStopped():
                self.phase = "stopped"
            case TrainingFinished():
                self.phase = "stopped" if self.phase == "stopping" else "finished"

    def _apply_to_workers(self, event: Event, now: float) -> None:
        match event:
            case WorkerStarted(worker, pid):
                self.workers[worker] = WorkerRow(worker, pid, "starting", now)
            case WorkerJoined(worker) if worker not in self.workers:
                self.workers[worker] = WorkerRow(worker, None, "joined", now)
            case WorkerJoined(worker):
                self._state(worker, "joined", now)
            case WorkerLost(worker):
                self._state(worker, "lost", now)
            case WorkerReleased(worker):
                self._state(worker, "leaving", now)
            case WorkerExited():
                self._exited(event, now)
            case WorkerVanished(worker):
                self._gone(worker, "vanished", now)
            case WorkerUnplaceable(worker):
                self._gone(worker, "found no place", now)

    def samples_per_second(self, now: float) -> float | None:
        """The rate over the last seconds; `None` with fewer than two steps in them."""
        recent = [entry for entry in self._rates if entry[0] > now - RATE_SECONDS]
        if len(recent) < 2 or recent[-1][0] <= recent[0][0]:
            return None
        return (recent[-1][1] - recent[0][1]) / (now - recent[0][0])

    def _state(self, worker: str, state: str, now: float, *, gone: bool = False) -> None:
        row = self.workers.get(worker)
        if row is not None and row.state != state:
            row.state, row.since, row.gone = state, now, gone

    def _exited(self, event: WorkerExited, now: float) -> None:
        if event.failure is not None:
            what = f"raised {event.failure.kind}"
        else:
            what = "ended" if event.code == 0 else describe_exit(event.code)
        self._gone(event.worker, what, now)

    def _gone(self, worker: str, what: str, now: float) -> None:
        self._state(worker, what, now, gone=True)
        gone = [row.name for row in self.workers.values() if row.gone]
        for name in gone[: max(0, len(gone) - GONE_KEPT)]:
            del self.workers[name]

    def _step(self, event: CommittedStep, now: float) -> None:
        if self.step is not None and event.step <= self.step:
            return
        self.phase = "stopping" if self.phase == "stopping" else "training"
        self.step, self.epoch = event.step, event.epoch
        self.learning_rate = None if math.isnan(event.learning_rate) else event.learning_rate
        if event.samples:
            self.samples += event.samples
            self._rates.append((now, self.samples))
            while self._rates[0][0] <= now - 2 * RATE_SECONDS:
                self._rates.popleft()
        if event.loss is not None:
            self.loss = event.loss
            self.losses.append(event.loss)

    def _formed(self, event: GenerationFormed, now: float) -> None:
        if self.generation is not None and event.generation < self.generation:
            return
        size = len(event.members) if event.size is None else event.size
        line = Rescale(now, event.generation, size, event.reason, tuple(event.phases.items()))
        if self.rescales and self.rescales[-1].generation == event.generation:
            self.rescales.pop()  # the same rescale; now more of its phases are measured
        self.rescales.append(line)
        self.generation = event.generation
        for row in list(self.workers.values()):
            member = row.name in event.members
            if row.pid is None and not member and row.state in ("lost", "leaving"):
                del self.workers[row.name]
            elif not row.gone and (member or row.state != "starting"):
                self._state(row.name, "training" if member else "standing by", now)
