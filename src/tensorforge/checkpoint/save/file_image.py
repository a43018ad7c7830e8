"""A file before it is on disk: a plan and the memory that its bytes come from."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorforge.checkpoint.format.boxes import Box
from tensorforge.checkpoint.format.file_layout import FilePlan, Segment

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_stop = operator.itemgetter(1)


@dataclass(frozen=True, slots=True)
class PendingChunk:
    """A chunk of a file that is not written yet."""

    segment: int
    box: Box
    start: int
    length: int


class FileImage:
    """A planned file whose segments lie in memory, or whose bytes were staged as a whole.

    `sources` gives a segment's bytes by its number; it is asked whenever they are needed.
    """

    def __init__(self, plan: FilePlan, sources: Callable[[int], Bytes]) -> None:
        self.plan = plan
        self._sources = sources
        self._staged: Bytes | None = None
        self._places = [(segment.start, segment.stop) for segment in plan.segments]
        self.chunks: Sequence[PendingChunk] = [
            PendingChunk(index, box, start, length)
            for index, segment in enumerate(plan.segments)
            for box, start, length in segment.chunks()
        ]

    def segment_of(self, chunk: PendingChunk) -> Segment:
        """The segment that a chunk is part of."""
        return self.plan.segments[chunk.segment]

    def chunk_bytes(self, chunk: PendingChunk) -> Bytes:
        """A chunk's bytes, not copied."""
        if self._staged is not None:
            return self._staged[chunk.start : chunk.start + chunk.length]
        start = chunk.start - self.segment_of(chunk).start
        return self._sources(chunk.segment)[start : start + chunk.length]

    def chunks_beginning_in(self, start: int, stop: int) -> range:
        """The numbers of the chunks whose first byte lies in a range of the file."""
        low = bisect.bisect_left(self.chunks, start, key=lambda chunk: chunk.start)
        return range(low, bisect.bisect_left(self.chunks, stop, key=lambda chunk: chunk.start))

    def block(self, start: int, length: int, scratch: Bytes) -> Bytes:
        """Bytes of the file, in `scratch` or in the staged memory, which has room for whole blocks."""
        if self._staged is not None:
            return self._staged[start : start + length]
        content = min(length, self.plan.size - start)
        self.fill(start, scratch[:content])
        scratch[content:length] = 0
        return scratch[:length]

    def fill(self, start: int, into: Bytes) -> None:
        """Copy the file's bytes from `start` on into a buffer."""
        stop, header = start + len(into), self.plan.header
        if start < len(header):
            part = np.frombuffer(header[start:stop], np.uint8)
            into[: len(part)] = part
        index = bisect.bisect_right(self._places, start, key=_stop)
        while index < len(self._places) and self._places[index][0] < stop:
            first, last = self._places[index]
            low, high = max(start, first), min(stop, last)
            if low < high:
                source = self._sources(index)[low - first : high - first]
                np.copyto(into[low - start : high - start], source)
            index += 1

    def stage(self, memory: Bytes) -> None:
        """From now on take all bytes from `memory`, into which the whole file was filled."""
        self._staged = memory
