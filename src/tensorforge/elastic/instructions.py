"""What the machine tells its shell to do, in this order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tensorforge.elastic.messages import FromCoordinator
from tensorforge.elastic.records import Entry


@dataclass(frozen=True, slots=True)
class Record:
    """Make this entry durable before anything that follows is carried out."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Send:
    """Send one message to these streams."""

    connections: tuple[int, ...]
    message: FromCoordinator


@dataclass(frozen=True, slots=True)
class Close:
    """End a stream, after what was sent to it before."""

    connection: int


@dataclass(frozen=True, slots=True)
class Note:
    """Tell the log (and whoever watches) what happened. `level` is a logging level's name."""

    level: str
    text: str


Instruction: TypeAlias = Record | Send | Close | Note
