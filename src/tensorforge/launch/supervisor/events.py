"""The events of a launched run. The supervisor decides by them and the display shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.launch.supervisor.exit_codes import UserFailure


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """The worker's process was started, or a spare process was activated as this worker."""

    worker: str
    pid: int
    host: str = ""
    """The machine, in the words of the engine that placed the worker; empty for the launcher's own."""
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerUnplaceable:
    """The worker's process could not be started on any machine."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerVanished:
    """The worker's machine cannot be reached. The process may still run: this is no proof of an exit."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class HostNotice:
    """The machine on which the worker runs will be taken away in `seconds`."""

    worker: str
    seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SpareReady:
    """A spare process has finished its imports and waits to become this worker."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """The coordinator lists the worker, as a member or as a standby."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The coordinator declared the worker lost: it was silent, or did not answer in time."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerReleased:
    """The coordinator released the worker, which leaves gracefully.

    `surplus`: the target already counts this departure. The worker leaves because the target was lowered, or
    an operator set the target after the worker was asked to leave.
    """

    worker: str
    reason: str = ""
    surplus: bool = False


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The worker's process exited. `failure`: the exception that its script raised, if any."""

    worker: str
    code: int
    failure: UserFailure | None = None


@dataclass(frozen=True, slots=True)
class WorkerConcluded:
    """The training code wrote its final log line; `outcome` is complete, stopped or left."""

    worker: str
    outcome: str


@dataclass(frozen=True, slots=True)
class StacksDumped:
    """The worker dumped the stack of its script."""

    worker: str
    text: str


@dataclass(frozen=True, slots=True)
class TrainingResumed:
    """The members start from the checkpoint of `step` (-1: from the beginning), not from a peer's state.

    `before`: the last step that this launch had committed; the workers that had its state are gone.
    """

    step: int
    before: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationFormed:
    """A rescale is complete: its members, its reason, and the milliseconds of each phase."""

    generation: int
    members: tuple[str, ...]
    reason: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    size: int | None = None
    """How many members the generation was decided with; `members` are those that are present now."""


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """A checkpoint is being written, or is complete."""

    step: int
    complete: bool


@dataclass(frozen=True, slots=True)
class TargetChanged:
    """An operator set another target for the number of workers."""

    workers: int


@dataclass(frozen=True, slots=True)
class TrainingFinished:
    """All members completed the training."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class TrainingStopped:
    """The run ended before its goal was reached, and can be continued; the reason says at which step."""

    reason: str


@dataclass(frozen=True, slots=True)
class TrainingAborted:
    """The coordinator ended the run for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class CoordinatorStarted:
    """The coordinator's process serves at this address."""

    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class CoordinatorExited:
    """The coordinator's process exited; `reason`: the error that it printed, if any."""

    code: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The launcher received a signal to stop; `signal` is its number."""

    signal: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed and nothing else happened."""


Event: TypeAlias = (
    WorkerStarted
    | WorkerUnplaceable
    | WorkerVanished
    | HostNotice
    | SpareReady
    | WorkerJoined
    | WorkerLost
    | WorkerReleased
    | WorkerConcluded
    | WorkerExited
    | StacksDumped
    | CommittedStep
    | TrainingResumed
    | GenerationFormed
    | CheckpointProgress
    | TargetChanged
    | TrainingFinished
    | TrainingStopped
    | TrainingAborted
    | CoordinatorStarted
    | CoordinatorExited
    | StopRequested
    | Tick
)
