"""A trace: the recorded allocations and releases of a program, with times and labels.

Files are JSON, compressed if the name ends in `.gz`:

    {"type": "allocation-trace", "version": 1, "name": …, "labels": […], "events": […]}

An event is `[microseconds since the previous event, size, label number]` for an allocation, which gets the next
block number from 0, or `[microseconds, block number]` for a release.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tensorforge.errors import EncodingError, InvalidInputError, NotFoundError
from tensorforge.validation import is_whole_number

TYPE = "allocation-trace"
VERSION = 1


class Event(NamedTuple):
    """One allocation (`size` positive) or release (the same size, negative) of a numbered block."""

    time: float
    block: int
    size: int
    label: str = ""


class Lifetime(NamedTuple):
    """A block with the indexes of the event that allocated it and of the one that freed it."""

    block: int
    size: int
    start: int
    stop: int
    label: str


class AllocationTrace:
    """Events in order of time. Every block is allocated once and freed at most once.

    `time` is in seconds since the start of the recording. A trace that contradicts itself is an
    `InvalidInputError`.
    """

    __slots__ = ("events", "name")

    def __init__(self, events: Iterable[Event], *, name: str = "trace") -> None:
        self.name = name
        self.events = tuple(events)
        _check(self.events)

    def __len__(self) -> int:
        return len(self.events)

    @property
    def duration(self) -> float:
        """Seconds from the first event to the last."""
        return self.events[-1].time - self.events[0].time if self.events else 0.0

    @property
    def allocations(self) -> int:
        """How many blocks were allocated."""
        return sum(event.size > 0 for event in self.events)

    def live_bytes(self) -> list[int]:
        """The bytes in use after each event."""
        live, series = 0, []
        for event in self.events:
            live += event.size
            series.append(live)
        return series

    @property
    def peak_live(self) -> int:
        """The most bytes in use at the same time; without eviction no pool can be smaller."""
        return max(self.live_bytes(), default=0)

    def lifetimes(self) -> list[Lifetime]:
        """The lifetime of every block, in order of allocation; `stop` is `len(self)` if it was not freed."""
        freed = {event.block: index for index, event in enumerate(self.events) if event.size < 0}
        return [
            Lifetime(event.block, event.size, index, freed.get(event.block, len(self)), event.label)
            for index, event in enumerate(self.events)
            if event.size > 0
        ]

    def save(self, path: str | Path) -> None:
        """Write the trace to a file, compressed if its name ends in `.gz`."""
        path = Path(path)
        text = json.dumps(self.to_json(), separators=(",", ":")).encode()
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)

    def to_json(self) -> dict[str, Any]:
        """The trace as JSON-able data."""
        labels: dict[str, int] = {}
        numbers: dict[int, int] = {}
        rows: list[list[int]] = []
        before = 0
        for event in self.events:
            now = round(event.time * 1e6)
            if event.size > 0:
                numbers[event.block] = len(numbers)
                label = labels.setdefault(event.label, len(labels))
                rows.append([now - before, event.size, label])
            else:
                rows.append([now - before, numbers[event.block]])
            before = now
        return {
            "type": TYPE,
            "version": VERSION,
            "name": self.name,
            "labels": list(labels),
            "events": rows,
        }

    @classmethod
    def from_json(cls, data: Any) -> AllocationTrace:
        """The trace that `to_json` encoded; anything else is an `EncodingError`."""
        if not isinstance(data, dict) or data.get("type") != TYPE:
            raise EncodingError(f"expected an object of type {TYPE!r}")
        if data.get("version") != VERSION:
            raise EncodingError(f"trace version {data.get('version')!r}: only {VERSION} is known")
        try:
            return cls(_decode(data["labels"], data["events"]), name=str(data["name"]))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EncodingError(f"not a valid allocation trace: {error!r}") from error

    @classmethod
    def load(cls, path: str | Path) -> AllocationTrace:
        """Read what `save` wrote."""
        return cls.from_json(read_json(path))


def read_json(path: str | Path) -> Any:
    """Read the JSON in a file, compressed or not; errors name the file."""
    path = Path(path)
    try:
        raw = path.read_bytes()
        return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise InvalidInputError(f"{path} is a folder, not a trace") from None
    except (ValueError, EOFError, zlib.error, OSError) as error:
        raise EncodingError(f"{path} is not a trace: {error}") from error


def _decode(labels: list[str], rows: list[list[int]]) -> Iterator[Event]:
    microseconds = 0
    sizes: list[int] = []
    for row in rows:
        if not all(is_whole_number(number) and number >= 0 for number in row):
            raise EncodingError(f"event {row!r}: all numbers must be whole and not negative")
        microseconds += row[0]
        if len(row) == 3:
            yield Event(microseconds / 1e6, len(sizes), row[1], labels[row[2]])
            sizes.append(row[1])
        else:
            _, block = row
            yield Event(microseconds / 1e6, block, -sizes[block])


def _check(events: tuple[Event, ...]) -> None:
    live: dict[int, int] = {}
    seen: set[int] = set()
    before = events[0].time if events else 0.0
    for index, (time, block, size, _) in enumerate(events):
        if not time >= before:
            raise InvalidInputError(f"event {index}: time runs backwards, {before} to {time}")
        if size > 0:
            if block in seen:
                raise InvalidInputError(f"event {index}: block {block} is allocated twice")
            seen.add(block)
            live[block] = size
        elif live.pop(block, None) != -size or size == 0:
            raise InvalidInputError(
                f"event {index}: block {block} of {-size} bytes is freed, but no such block is live"
            )
        before = time
