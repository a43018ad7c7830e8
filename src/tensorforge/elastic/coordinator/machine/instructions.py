"""What the machine tells its shell to do, in this order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tensorforge.elastic.coordinator.journal_records import Entry
from tensorforge.elastic.protocol.messages import FromCoordinator, Refused


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


class Outbox:
    """Collects the instructions that one event leads to."""

    def __init__(self) -> None:
        self._instructions: list[Instruction] = []
        self.refusals = 0

    def take(self) -> list[Instruction]:
        """Everything since the last call, in order."""
        taken, self._instructions = self._instructions, []
        return taken

    def record(self, entry: Entry) -> None:
        """Have it made durable."""
        self._instructions.append(Record(entry))

    def send(self, connections: tuple[int, ...], message: FromCoordinator) -> None:
        """Have it sent; to nobody is fine."""
        if connections:
            self._instructions.append(Send(connections, message))

    def close(self, connection: int) -> None:
        """Have the stream ended."""
        self._instructions.append(Close(connection))

    def note(self, level: str, text: str) -> None:
        """Have it logged."""
        self._instructions.append(Note(level, text))

    def refuse(self, connection: int, code: str, why: str) -> None:
        """Have the stream ended with a reason."""
        self.refusals += 1
        self.send((connection,), Refused(code=code, reason=why))
        self.close(connection)
        self.note("warning", f"refused ({code}): {why}")
