"""The inputs of the coordinator's machine: what `Machine.handle` takes, beside the clients' commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tensorforge.elastic.protocol.commands import Command
from tensorforge.elastic.protocol.messages import FromWorker


@dataclass(frozen=True, slots=True)
class Received:
    """A worker's message arrived on a stream."""

    connection: int
    message: FromWorker


@dataclass(frozen=True, slots=True)
class Closed:
    """A stream broke or ended; the server noticed at `seen_at`."""

    connection: int
    reason: str
    seen_at: float


@dataclass(frozen=True, slots=True)
class Alive:
    """The connections below these streams answer their pings."""

    connections: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Announced:
    """This generation is in the journal, and its announcement was given to the streams."""

    generation: int


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline may have passed."""


Input: TypeAlias = Received | Closed | Alive | Announced | Tick | Command
