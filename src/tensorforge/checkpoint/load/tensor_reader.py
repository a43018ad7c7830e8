"""Reads chunks into tensors, on several threads; each chunk is read and verified once.

A complete chunk with codec `raw` whose elements are consecutive in the memory of a tensor is read directly into
that memory. Every other chunk is read into a scratch buffer, verified and decoded there, and then copied.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tensorforge.checkpoint.format.boxes import Box
from tensorforge.checkpoint.format.formats import ITEM_SIZES
from tensorforge.checkpoint.format.manifest import RAW, StoredBytes
from tensorforge.checkpoint.load.resharding import ChunkRead, RangeRead, WantedBox, plan_reads
from tensorforge.checkpoint.load.stored_chunks import BufferRead, StoredChunks
from tensorforge.checkpoint.options import Progress
from tensorforge.checkpoint.parallel import ByteCounter, Deadline, run_parallel
from tensorforge.checkpoint.save.file_contents import Bytes
from tensorforge.checkpoint.save.staging import block_buffer
from tensorforge.checkpoint.tensors import DTYPES, byte_view, is_direct

WORKERS = 4
MAX_DIRECT_READ = 16 << 20
"""The most bytes of one direct read, which opens the file once for many chunks."""
MAX_CACHED_READ = 64 << 20
"""The same for files that are cached in memory. Reads become shorter towards the end of a load, so that all
threads end at about the same time."""
_READING = "reading the checkpoint"


@dataclass(frozen=True, slots=True)
class Destination:
    """A box of a saved tensor, and the tensor of the same shape and any element type to load it into."""

    name: str
    box: Box
    tensor: torch.Tensor


def read_tensors(
    source: StoredChunks,
    destinations: Sequence[Destination],
    *,
    deadline: Deadline,
    progress: Progress | None = None,
    workers: int = WORKERS,
) -> None:
    """Fill every destination; `CheckpointError` names the file and the tensor of a damaged chunk."""
    wanted = [WantedBox(index, each.name, each.box) for index, each in enumerate(destinations)]
    reads = plan_reads(source.manifest.tensors, wanted)
    counter = ByteCounter(sum(read.length for read in reads), progress)
    threads, longest = WORKERS, MAX_DIRECT_READ
    if all(source.is_cached(file) for file in {read.file for read in reads}):
        # More threads than processors would only slow each other down while they copy memory.
        threads, longest = len(os.sched_getaffinity(0)), MAX_CACHED_READ
    threads = min(workers, threads)
    reader = _Reader(source, destinations)

    def tasks() -> Iterator[Callable[[Bytes], None]]:
        for read in reader.join_direct(reads, threads, longest):

            def task(scratch: Bytes, read: _DirectRead | RangeRead = read) -> None:
                reader.read(read, scratch)
                counter.add(read.length)

            yield task

    buffer = functools.partial(block_buffer, deadline)
    with torch.no_grad():
        run_parallel(tasks(), buffer, workers=threads, deadline=deadline, what=_READING)


_Position = tuple[int, int]
"""The index of a destination, and a byte in its memory."""


class _DestinationRange:
    """A range of one destination's memory, and the consecutive chunks that fill it."""

    def __init__(self, position: _Position) -> None:
        self.index, self.start = position
        self.length = 0
        self.chunks: list[tuple[str, StoredBytes]] = []

    @property
    def end(self) -> _Position:
        """The position after the last chunk."""
        return self.index, self.start + self.length


class _DirectRead:
    """Consecutive chunks of a file that are read directly into the memory of destinations."""

    def __init__(self, longest: int) -> None:
        self.length = 0
        self.ranges: list[_DestinationRange] = []
        self._longest = longest

    def add(self, read: RangeRead, position: _Position, *, anywhere: bool) -> bool:
        """Append a chunk if it follows the last one in the file and the read does not become too long.

        Unless `anywhere`, the chunk must also follow the last one in the memory of the destination. Returns
        whether the chunk was appended.
        """
        stored = read.chunks[0].chunk.data
        if self.ranges:
            last = self.ranges[-1]
            end = last.chunks[-1][1]
            if (
                (stored.file, stored.start) != (end.file, end.start + end.length)
                or self.length + stored.length > self._longest
                or not (anywhere or position == last.end)
            ):
                return False
        if not self.ranges or position != self.ranges[-1].end:
            self.ranges.append(_DestinationRange(position))
        self.ranges[-1].chunks.append((read.chunks[0].name, stored))
        self.ranges[-1].length += stored.length
        self.length += stored.length
        return True


class _Reader:
    """Executes reads and fills the destinations."""

    def __init__(self, source: StoredChunks, destinations: Sequence[Destination]) -> None:
        self._source = source
        self._destinations = destinations
        self._memory: dict[int, Bytes] = {
            index: byte_view(destination.tensor)
            for index, destination in enumerate(destinations)
            if is_direct(destination.tensor)
        }

    def join_direct(
        self, reads: Sequence[RangeRead], threads: int, longest: int
    ) -> Iterator[_DirectRead | RangeRead]:
        """The reads in order, with consecutive ones that can be direct joined into direct reads.

        Towards the end the direct reads become shorter, so that all threads end at about the same time.
        """
        left = sum(read.length for read in reads)
        direct: _DirectRead | None = None
        for read in reads:
            position = self._direct_position(read)
            if direct is not None and not (
                position and direct.add(read, position, anywhere=self._source.reads_sequentially)
            ):
                left -= direct.length
                yield direct
                direct = None
            if position is None:
                left -= read.length
                yield read
            elif direct is None:
                direct = _DirectRead(min(longest, left // (2 * threads)))
                direct.add(read, position, anywhere=True)
        if direct is not None:
            yield direct

    def read(self, read: _DirectRead | RangeRead, scratch: Bytes) -> None:
        """Read and verify chunks, and fill the destinations."""
        if isinstance(read, _DirectRead):
            self._source.read_raw([self._buffer_read(each) for each in read.ranges])
            return
        buffer = scratch if read.length <= len(scratch) else np.empty(read.length, np.uint8)
        self._source.read_range(read.file, read.start, buffer[: read.length].data)
        for chunk in read.chunks:
            start = chunk.chunk.data.start - read.start
            self._copy(chunk, buffer[start : start + chunk.chunk.data.length])

    def _buffer_read(self, each: _DestinationRange) -> BufferRead:
        memory = self._memory[each.index][each.start : each.start + each.length]
        return BufferRead(memory.data, each.chunks)

    def _direct_position(self, read: RangeRead) -> _Position | None:
        """The memory of a destination that a read can fill directly; `None` if it needs a scratch buffer."""
        wanted = read.chunks[0]
        overlap = wanted.overlaps[0]
        index, box = overlap.wanted.index, wanted.chunk.box
        if (
            len(read.chunks) > 1
            or len(wanted.overlaps) > 1
            or wanted.chunk.data.codec != RAW
            or overlap.box != box
            or index not in self._memory
            or self._destinations[index].tensor.dtype != DTYPES[wanted.tensor.dtype]
        ):
            return None
        position = box.position_in(self._destinations[index].box)
        return None if position is None else (index, position * ITEM_SIZES[wanted.tensor.dtype])

    def _copy(self, read: ChunkRead, stored: Bytes) -> None:
        content = self._source.decode(read.name, read.tensor, read.chunk, stored.data)
        tensor = torch.frombuffer(content, dtype=DTYPES[read.tensor.dtype])
        tensor = tensor.reshape(read.chunk.shape)
        for overlap in read.overlaps:
            destination = self._destinations[overlap.wanted.index]
            elements = tensor[overlap.box.slices_in(read.chunk.box)]
            destination.tensor[overlap.box.slices_in(destination.box)].copy_(elements)
