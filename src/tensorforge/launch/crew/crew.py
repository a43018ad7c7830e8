"""The protocol between the launcher and whatever starts its workers: a machine, Ray, another engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from tensorforge.encoding import Json
from tensorforge.launch.processes.children import ChildEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to start as a worker.

    `words`: the arguments of the bootstrap, that is `[-m] SCRIPT [ARGUMENTS]`.
    `variables`: added to the environment of the machine on which the worker starts.
    `folder`: the working folder.
    `resources`: what the worker needs of a machine, such as `{"GPU": 1}`; a local crew needs none.
    `spare`: the process does its imports and waits until `its_turn` is called.
    `avoid`: hosts, as `Placed` named them, on which the worker must not start.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: Path = field(default_factory=Path.cwd)
    resources: Mapping[str, float] = field(default_factory=dict)
    spare: bool = False
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Placed:
    """The worker's process runs. For a spare, this event comes when its turn has come.

    `host`: the machine in the engine's words; empty for the launcher's own.
    """

    worker: str
    pid: int
    host: str = ""
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Logged:
    """A line of the worker's run log, from a machine whose run folder the launcher cannot read."""

    worker: str
    line: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Vanished:
    """The worker cannot be reached any more. Its process may still run: this is no proof of an exit."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unplaceable:
    """The worker's process was not started and will not be."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Notice:
    """The worker's machine will be taken away in `seconds`."""

    worker: str
    seconds: float
    reason: str = ""


CrewEvent: TypeAlias = ChildEvent | Placed | Logged | Vanished | Unplaceable | Notice


class Crew(Protocol):
    """The processes of one launch. Only `wake` may be called from other threads.

    Each worker that is started has one of three ends: `Exited` (its exit was seen on its machine),
    `Vanished` or `Unplaceable`. No event of the worker follows. `signal`, `kill` and `its_turn` raise
    `NotFoundError` for a name that is not in `names`.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The workers and processes that have not ended yet, those without a place included."""

    @property
    def wake_fd(self) -> int:
        """A descriptor for `signal.set_wakeup_fd`: a byte written to it makes `poll` return."""

    def wake(self) -> None:
        """Make `poll` return early; may be called from any thread."""

    def start(self, name: str, order: Order) -> None:
        """Start a worker, now or when there is a place for it; `Placed` or `Unplaceable` follows."""

    def its_turn(self, name: str, variables: Mapping[str, str]) -> None:
        """Let a spare run its script with these variables in addition; `Placed` follows."""

    def signal(self, name: str, number: int) -> None:
        """Send a signal. A worker that waits for a place is cancelled by SIGTERM; others are ignored."""

    def kill(self, name: str) -> None:
        """Kill the worker with its process group, or cancel it if it waits for a place."""

    def abandon(self, name: str) -> None:
        """Forget a worker that vanished, and free its place as far as that is possible."""

    def start_here(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start another process, such as the coordinator, on the launcher's machine; return its pid."""

    def poll(self, timeout: float | None) -> list[CrewEvent]:
        """Wait at most `timeout` seconds for events and return them in order."""

    def close(self) -> None:
        """End all processes that can be reached. May be called twice."""
