"""What the supervisor tells the shell around it to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from tensorforge.launch.supervisor.exit_codes import UserFailure


class Level(Enum):
    """How much a notice matters."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class StartCoordinator:
    """Start the coordinator's process, on the journal of the one before."""


@dataclass(frozen=True, slots=True)
class StopCoordinator:
    """End the coordinator's process; nobody needs it any more."""


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker's process; the coordinator decides whether it takes part or stands by."""

    worker: str


@dataclass(frozen=True, slots=True)
class SetTarget:
    """Tell the coordinator how many workers there are to be."""

    workers: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Ask a worker to leave gracefully."""

    worker: str


@dataclass(frozen=True, slots=True)
class StopTraining:
    """Have the run stopped on all workers after the current step, with a checkpoint."""

    worker: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End a worker's process, and what it started, now."""

    worker: str


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Have a worker write down its script's stack; the answer is a `StacksDumped`."""

    worker: str


@dataclass(frozen=True, slots=True)
class Say:
    """Tell people."""

    text: str
    level: Level = Level.INFO
    worker: str | None = None
    detail: str = ""
    """Lines of the worker's that belong to it: a traceback, a stack."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended. `code` is the launcher's exit code: 0 only if training finished."""

    code: int
    reason: str
    worker: str | None = None
    failure: UserFailure | None = None


@dataclass(frozen=True, slots=True)
class End:
    """Everything has stopped; return the outcome."""

    outcome: Outcome


Instruction: TypeAlias = (
    StartCoordinator
    | StopCoordinator
    | StartWorker
    | SetTarget
    | Retire
    | StopTraining
    | Kill
    | DumpStacks
    | Say
    | End
)
