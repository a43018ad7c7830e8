"""What can happen to the coordinator: the events that `Machine.handle` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tensorforge.elastic.protocol.messages import FromWorker


@dataclass(frozen=True, slots=True)
class Received:
    """A message came in on a stream."""

    connection: int
    message: FromWorker


@dataclass(frozen=True, slots=True)
class Closed:
    """A stream broke or ended; `seen_at` is when the shell noticed."""

    connection: int
    reason: str
    seen_at: float


@dataclass(frozen=True, slots=True)
class Alive:
    """The transport below these streams answered its pings."""

    connections: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exited:
    """A launcher saw the worker's process end. With `pid`, only if that process is the one known."""

    worker_id: str
    reason: str
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class ScaleRequested:
    """Somebody wants this many workers.

    With `expected`, only if nobody has set another number since that version of it.
    """

    workers: int
    by: str
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class RemovalRequested:
    """Somebody wants this worker to leave gracefully."""

    worker_id: str
    by: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants the run to end."""

    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class Announced:
    """The journal holds this generation, and its announcement was handed to the streams."""

    generation: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Input: TypeAlias = (
    Received
    | Closed
    | Alive
    | Exited
    | ScaleRequested
    | RemovalRequested
    | StopRequested
    | Announced
    | Tick
)
