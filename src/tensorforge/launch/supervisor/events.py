"""What happens to a launched run: the events that the supervisor decides by and the view shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from tensorforge.launch.supervisor.exit_codes import UserFailure


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """The worker's process runs."""

    worker: str
    pid: int


@dataclass(frozen=True, slots=True)
class SpareReady:
    """The process that will be the next worker has done its imports."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """The coordinator knows the worker, as a member or as a standby."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The coordinator gave the worker up: it was silent, or did not answer in time."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerReleased:
    """The coordinator let the worker go after a graceful leave that was asked of it.

    `surplus`: the number of workers that is wanted knows of it. It goes because fewer are wanted, or
    somebody has asked for a number since it was to go.
    """

    worker: str
    reason: str = ""
    surplus: bool = False


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The worker's process ended. `failure` is the exception that its script raised, if it did."""

    worker: str
    code: int
    failure: UserFailure | None = None


@dataclass(frozen=True, slots=True)
class WorkerConcluded:
    """The training code's own last word: `outcome` is complete, stopped or left."""

    worker: str
    outcome: str


@dataclass(frozen=True, slots=True)
class StacksDumped:
    """The worker wrote down its script's stack."""

    worker: str
    text: str


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """A step was committed. `samples` counts from the start of the run."""

    step: int
    epoch: int = 0
    samples: int = 0
    loss: float | None = None
    learning_rate: float | None = None


@dataclass(frozen=True, slots=True)
class TrainingResumed:
    """The members start from a checkpoint (`step`; -1: from the beginning), not from what a peer has.

    `before` is how far this launch had come; the workers that knew of it are gone.
    """

    step: int
    before: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationFormed:
    """A rescale is over: who trains now, why, and how long each phase took, in milliseconds."""

    generation: int
    members: tuple[str, ...]
    reason: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    size: int | None = None
    """How many members it was decided with; `members` are those that are seen in it now."""


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """A checkpoint is being written (`share` of it, if that is known), or is complete."""

    step: int
    complete: bool
    share: float | None = None


@dataclass(frozen=True, slots=True)
class TargetChanged:
    """Someone asked for another number of workers."""

    workers: int


@dataclass(frozen=True, slots=True)
class TrainingFinished:
    """All members completed the training."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class TrainingAborted:
    """The coordinator ended the run, and says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class CoordinatorStarted:
    """The coordinator's process answers at this address."""

    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class CoordinatorExited:
    """The coordinator's process ended; `reason` is what it said about that, if it did."""

    code: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """A signal asked the launcher to stop; `signal` is its number."""

    signal: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing but time has passed."""


Event: TypeAlias = (
    WorkerStarted
    | SpareReady
    | WorkerJoined
    | WorkerLost
    | WorkerReleased
    | WorkerConcluded
    | WorkerExited
    | StacksDumped
    | StepCommitted
    | TrainingResumed
    | GenerationFormed
    | CheckpointProgress
    | TargetChanged
    | TrainingFinished
    | TrainingAborted
    | CoordinatorStarted
    | CoordinatorExited
    | StopRequested
    | Tick
)
