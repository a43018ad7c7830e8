"""A file before it is on disk: a plan and the memory that its bytes come from."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorforge.checkpoint.boxes import Box
from tensorforge.checkpoint.layout import FilePlan, Segment

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


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
        for index in self._segments_in(start, stop):
            segment = self.plan.segments[index]
            low, high = max(start, segment.start), min(stop, segment.stop)
            source = self._sources(index)[low - segment.start : high - segment.start]
            np.copyto(into[low - start : high - start], source)

    def _segments_in(self, start: int, stop: int) -> Iterator[int]:
        segments = self.plan.segments
        index = bisect.bisect_right(segments, start, key=lambda segment: segment.stop)
        while index < len(segments) and segments[index].start < stop:
            if segments[index].length:
                yield index
            index += 1

    def stage(self, memory: Bytes) -> None:
        """From now on take all bytes from `memory`, into which the whole file was filled."""
        self._staged = memory
