"""Reading chunks into tensors: in parallel, each verified, each once.

A whole chunk that is stored as it is and lands in one run of a tensor's memory is read straight into it.
Everything else goes through a scratch buffer, where it is verified and decoded before any tensor sees it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tensorforge.checkpoint.format.boxes import Box
from tensorforge.checkpoint.format.dtypes import ITEM_SIZES
from tensorforge.checkpoint.format.manifest import RAW, CheckpointManifest, StoredBytes
from tensorforge.checkpoint.load.chunks import ChunkSource, Landing
from tensorforge.checkpoint.load.resharding import ChunkRead, RangeRead, Target, plan_reads
from tensorforge.checkpoint.options import Progress
from tensorforge.checkpoint.parallel import Guard, run_parallel
from tensorforge.checkpoint.progress import Meter
from tensorforge.checkpoint.save.file_image import Bytes
from tensorforge.checkpoint.save.staging import block_buffer
from tensorforge.checkpoint.tensors import DTYPES, byte_view, is_direct

WORKERS = 4
MAX_RUN = 16 << 20
"""What a thread reads at one go, chunk by chunk: opening a file for each would take longer."""
MAX_RUN_AT_HAND = 64 << 20
"""The same where there is nothing to wait for; runs become shorter towards the end, so that all threads
end together."""
_READING = "reading the checkpoint"


@dataclass(frozen=True, slots=True)
class Destination:
    """A box of a saved tensor and the memory that it goes to, of the same shape and any type."""

    name: str
    box: Box
    tensor: torch.Tensor


def _plan(manifest: CheckpointManifest, destinations: Sequence[Destination]) -> list[RangeRead]:
    targets = [
        Target(index, destination.name, destination.box)
        for index, destination in enumerate(destinations)
    ]
    return plan_reads(manifest.tensors, targets)


def read_tensors(
    source: ChunkSource,
    destinations: Sequence[Destination],
    *,
    guard: Guard,
    progress: Progress | None = None,
    workers: int = WORKERS,
) -> None:
    """Fill every destination; `CheckpointError` names the file and the tensor of the first bad byte."""
    reads = _plan(source.manifest, destinations)
    meter = Meter(sum(read.length for read in reads), progress)
    threads, longest = WORKERS, MAX_RUN
    if all(source.is_at_hand(file) for file in {read.file for read in reads}):
        # Threads that only copy get in each other's way if there are more of them than processors.
        threads, longest = len(os.sched_getaffinity(0)), MAX_RUN_AT_HAND
    threads = min(workers, threads)
    transfer = _Transfer(source, destinations)

    def tasks() -> Iterator[Callable[[Bytes], None]]:
        for work in transfer.joined(reads, threads, longest):

            def task(scratch: Bytes, work: _Run | RangeRead = work) -> None:
                transfer.carry(work, scratch)
                meter.add(work.length)

            yield task

    workplace = functools.partial(block_buffer, guard)
    with torch.no_grad():
        run_parallel(tasks(), workplace, workers=threads, guard=guard, what=_READING)


_Place = tuple[int, int]
"""Which destination, and from which of its bytes on."""


class _Stretch:
    """Chunks of a run that go side by side into the memory of one destination."""

    def __init__(self, place: _Place) -> None:
        self.index, self.start = place
        self.length = 0
        self.chunks: list[tuple[str, StoredBytes]] = []

    @property
    def end(self) -> _Place:
        """Where the next chunk would go."""
        return self.index, self.start + self.length


class _Run:
    """Chunks that lie side by side in a file, each bound for a place in the memory of a destination."""

    def __init__(self, longest: int) -> None:
        self.length = 0
        self.stretches: list[_Stretch] = []
        self._longest = longest

    def take(self, read: RangeRead, place: _Place, *, anywhere: bool) -> bool:
        """Add the next read, if it goes on where the last one ends and is not too much.

        Unless it may go `anywhere`, it must go on in the memory of the destination as well.
        """
        stored = read.chunks[0].chunk.data
        if self.stretches:
            last = self.stretches[-1]
            end = last.chunks[-1][1]
            if (
                (stored.file, stored.start) != (end.file, end.start + end.length)
                or self.length + stored.length > self._longest
                or not (anywhere or place == last.end)
            ):
                return False
        if not self.stretches or place != self.stretches[-1].end:
            self.stretches.append(_Stretch(place))
        self.stretches[-1].chunks.append((read.chunks[0].name, stored))
        self.stretches[-1].length += stored.length
        self.length += stored.length
        return True


class _Transfer:
    """Carries chunks from their source to the destinations."""

    def __init__(self, source: ChunkSource, destinations: Sequence[Destination]) -> None:
        self._source = source
        self._destinations = destinations
        self._memory: dict[int, Bytes] = {
            index: byte_view(destination.tensor)
            for index, destination in enumerate(destinations)
            if is_direct(destination.tensor)
        }

    def joined(
        self, reads: Sequence[RangeRead], threads: int, longest: int
    ) -> Iterator[_Run | RangeRead]:
        """The reads in their order; those that can go straight into memory as runs, as long as may be.

        Towards the end they become shorter, so that no thread has much to do when the others are done.
        """
        left = sum(read.length for read in reads)
        run: _Run | None = None
        for read in reads:
            place = self._place(read)
            if run is not None and not (
                place and run.take(read, place, anywhere=self._source.reads_on)
            ):
                left -= run.length
                yield run
                run = None
            if place is None:
                left -= read.length
                yield read
            elif run is None:
                run = _Run(min(longest, left // (2 * threads)))
                run.take(read, place, anywhere=True)
        if run is not None:
            yield run

    def carry(self, work: _Run | RangeRead, scratch: Bytes) -> None:
        """Read and verify, and fill what it is for."""
        if isinstance(work, _Run):
            self._source.read_run([self._landing(stretch) for stretch in work.stretches])
            return
        room = scratch if work.length <= len(scratch) else np.empty(work.length, np.uint8)
        self._source.read_range(work.file, work.start, room[: work.length].data)
        for chunk in work.chunks:
            start = chunk.chunk.data.start - work.start
            self._deliver(chunk, room[start : start + chunk.chunk.data.length])

    def _landing(self, stretch: _Stretch) -> Landing:
        memory = self._memory[stretch.index][stretch.start : stretch.start + stretch.length]
        return Landing(memory.data, stretch.chunks)

    def _place(self, read: RangeRead) -> _Place | None:
        """Which destination a read can go straight into, and from which of its bytes on, if there is one."""
        wanted = read.chunks[0]
        delivery = wanted.deliveries[0]
        index, box = delivery.target.index, wanted.chunk.box
        if (
            len(read.chunks) > 1
            or len(wanted.deliveries) > 1
            or wanted.chunk.data.codec != RAW
            or delivery.overlap != box
            or index not in self._memory
            or self._destinations[index].tensor.dtype != DTYPES[wanted.tensor.dtype]
        ):
            return None
        position = box.run_in(self._destinations[index].box)
        return None if position is None else (index, position * ITEM_SIZES[wanted.tensor.dtype])

    def _deliver(self, read: ChunkRead, stored: Bytes) -> None:
        content = self._source.decode(read.name, read.tensor, read.chunk, stored.data)
        tensor = torch.frombuffer(content, dtype=DTYPES[read.tensor.dtype])
        tensor = tensor.reshape(read.chunk.shape)
        for delivery in read.deliveries:
            destination = self._destinations[delivery.target.index]
            part = tensor[delivery.overlap.slices_in(read.chunk.box)]
            destination.tensor[delivery.overlap.slices_in(destination.box)].copy_(part)
