"""What the machine tells the control server to do, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tensorforge.elastic.coordinator.journal_records import Entry
from tensorforge.elastic.protocol.messages import FromCoordinator, Refused


@dataclass(frozen=True, slots=True)
class Record:
    """Write this entry to the journal before any message is sent."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Send:
    """Send one message to these streams."""

    connections: tuple[int, ...]
    message: FromCoordinator


@dataclass(frozen=True, slots=True)
class Close:
    """End a stream after everything that was sent to it before."""

    connection: int


@dataclass(frozen=True, slots=True)
class Note:
    """Write a line to the log. `level` is the name of a logging level."""

    level: str
    text: str


Instruction: TypeAlias = Record | Send | Close | Note


class InstructionList:
    """Collects the instructions that follow from one input, in order."""

    def __init__(self) -> None:
        self._instructions: list[Instruction] = []
        self.refusals = 0

    def take(self) -> list[Instruction]:
        """Return the instructions since the last call."""
        taken, self._instructions = self._instructions, []
        return taken

    def record(self, entry: Entry) -> None:
        """Add a `Record`."""
        self._instructions.append(Record(entry))

    def send(self, connections: tuple[int, ...], message: FromCoordinator) -> None:
        """Add a `Send`, unless there is no receiver."""
        if connections:
            self._instructions.append(Send(connections, message))

    def close(self, connection: int) -> None:
        """Add a `Close`."""
        self._instructions.append(Close(connection))

    def note(self, level: str, text: str) -> None:
        """Add a `Note`."""
        self._instructions.append(Note(level, text))

    def refuse(self, connection: int, code: str, why: str) -> None:
        """Tell a stream why it is refused, and end it."""
        self.refusals += 1
        self.send((connection,), Refused(code=code, reason=why))
        self.close(connection)
        self.note("warning", f"refused ({code}): {why}")
