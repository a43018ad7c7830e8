"""Bytes of a child's output in, clean lines out: partial lines, progress bars, junk, escape codes."""

from __future__ import annotations

import re

LINE_LIMIT = 16 * 1024

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # control sequences: colours, cursor moves, erasing
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # strings: titles, links
    r"|\x1b[ -/]*[0-~]?",
    re.DOTALL,
)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


def clean(text: str, *, colour: bool) -> str:
    """Make a line safe to print beside others: it cannot move the cursor or change the terminal.

    Colours are kept (and closed) if `colour`; other escape codes go, control characters are shown as
    `\\xNN`.
    """
    parts, at = [], 0
    for found in _ESCAPES.finditer(text):
        parts.append(_visible(text[at : found.start()]))
        if colour and _COLOUR.fullmatch(found[0]):
            parts.append(found[0])
        at = found.end()
    coloured = any(part.startswith("\x1b") for part in parts)
    return "".join(parts) + _visible(text[at:]) + ("\x1b[0m" if coloured else "")


def _visible(text: str) -> str:
    return _CONTROL.sub(lambda found: _escape(found[0]), text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class LineSplitter:
    """Collects bytes and gives whole lines, however the bytes were cut on their way.

    A carriage return starts the line anew, as on a terminal, so of a progress bar only the last state
    before the line's end appears. A line longer than `limit` bytes comes in several parts, so that
    memory stays bounded. Bytes that are not UTF-8 become `\\xNN`.
    """

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self._limit = max(limit, 8)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[str]:
        """Add bytes; return the lines that they completed, without their line ends."""
        self._buffer += data
        lines = []
        while (parts := self._take()) is not None:
            lines += [part.decode("utf-8", errors="backslashreplace") for part in parts]
        return lines

    def flush(self) -> list[str]:
        """Return the last, unfinished line, if there is one."""
        rest = bytes(self._buffer).rstrip(b"\r")
        self._buffer.clear()
        return [rest.decode("utf-8", errors="backslashreplace")] if rest else []

    def _take(self) -> list[bytes] | None:
        """Remove what is settled at the buffer's front: a line, or one that was overwritten."""
        end = self._line_end()
        if end is None or end > self._limit:
            return [self._cut(self._limit)] if len(self._buffer) > self._limit else None
        if self._buffer[end] == 0x0A:
            return [self._remove(end, end + 1)]
        after = end
        while after < len(self._buffer) and self._buffer[after] == 0x0D:
            after += 1
        if after == len(self._buffer):
            # What follows decides: a line feed ends the line, anything else overwrites it.
            del self._buffer[end + 1 :]
            return None
        if self._buffer[after] == 0x0A:
            return [self._remove(end, after + 1)]
        self._remove(0, after)
        return []

    def _line_end(self) -> int | None:
        found = [at for at in (self._buffer.find(b"\n"), self._buffer.find(b"\r")) if at >= 0]
        return min(found, default=None)

    def _cut(self, at: int) -> bytes:
        start = at
        while start > at - 4 and self._buffer[start] & 0xC0 == 0x80:
            start -= 1  # do not cut a character in two
        if self._buffer[start] & 0xC0 == 0x80:
            start = at
        return self._remove(start, start)

    def _remove(self, end: int, upto: int) -> bytes:
        part = bytes(self._buffer[:end])
        del self._buffer[:upto]
        return part
