"""Turns the bytes of a child's output into lines that are safe to print beside others."""

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
    """Remove from a line what could move the cursor or change the terminal.

    Colours are kept, and reset at the end, if `colour`. Other escape codes are removed; control characters
    become `\\xNN`.
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
    """Collects bytes and returns complete lines, wherever the bytes were split.

    A carriage return restarts the line, as on a terminal, so that only the last state of a progress bar
    appears. A line of more than `limit` bytes is returned in several parts, so that memory stays
    bounded. Bytes that are not UTF-8 become `\\xNN`.
    """

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self._limit = max(limit, 8)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[str]:
        """Add bytes; return the lines that they complete, without line ends."""
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
        """Remove a complete or overwritten line from the front of the buffer; `None` if there is none."""
        end = self._line_end()
        if end is None or end > self._limit:
            return [self._cut(self._limit)] if len(self._buffer) > self._limit else None
        if self._buffer[end] == 0x0A:
            return [self._remove(end, end + 1)]
        after = end
        while after < len(self._buffer) and self._buffer[after] == 0x0D:
            after += 1
        if after == len(self._buffer):
            # The next byte decides: a line feed ends the line, any other byte overwrites it.
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
