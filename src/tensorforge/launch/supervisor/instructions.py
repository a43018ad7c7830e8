"""The instructions of the supervisor; the launcher carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from tensorforge.launch.supervisor.exit_codes import UserFailure


class Level(Enum):
    """The severity of a notice."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class StartCoordinator:
    """Start the coordinator's process on the run's journal."""


@dataclass(frozen=True, slots=True)
class StopCoordinator:
    """Send SIGTERM to the coordinator's process: all workers have exited."""


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker's process; the coordinator decides whether it is a member or a standby.

    `avoid`: the machines that will be taken away; the worker must not start there.
    """

    worker: str
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Abandon:
    """Forget a worker that vanished. Its process may still run; the coordinator fences it off."""

    worker: str


@dataclass(frozen=True, slots=True)
class SetTarget:
    """Tell the coordinator the target: how many workers there shall be."""

    workers: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Ask a worker to leave gracefully."""

    worker: str


@dataclass(frozen=True, slots=True)
class StopTraining:
    """Ask a worker to stop the run on all workers after the current step, with a checkpoint."""

    worker: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a worker's process and its process group now."""

    worker: str


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Ask a worker for the stack of its script; a `StacksDumped` event will answer."""

    worker: str


@dataclass(frozen=True, slots=True)
class Say:
    """Show a notice to people."""

    text: str
    level: Level = Level.INFO
    worker: str | None = None
    detail: str = ""
    """Lines to show below the notice: a traceback or a stack."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended. `code` is the launcher's exit code: 0 only if training finished."""

    code: int
    reason: str
    worker: str | None = None
    failure: UserFailure | None = None


@dataclass(frozen=True, slots=True)
class End:
    """All workers have exited; end the launcher with this outcome."""

    outcome: Outcome


Instruction: TypeAlias = (
    StartCoordinator
    | StopCoordinator
    | StartWorker
    | Abandon
    | SetTarget
    | Retire
    | StopTraining
    | Kill
    | DumpStacks
    | Say
    | End
)
