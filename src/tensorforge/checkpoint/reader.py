"""Reading chunks into tensors: in parallel, each verified, each once.

A whole chunk that is stored as it is and lands in one run of a tensor's memory is read straight into it.
Everything else goes through a scratch buffer, where it is verified and decoded before any tensor sees it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tensorforge.checkpoint.boxes import Box
from tensorforge.checkpoint.chunks import ChunkSource
from tensorforge.checkpoint.dtypes import ITEM_SIZES
from tensorforge.checkpoint.image import Bytes
from tensorforge.checkpoint.manifest import RAW, CheckpointManifest
from tensorforge.checkpoint.options import Progress
from tensorforge.checkpoint.parallel import Guard, run_parallel
from tensorforge.checkpoint.progress import Meter
from tensorforge.checkpoint.resharding import ChunkRead, RangeRead, Target, plan_reads
from tensorforge.checkpoint.staging import block_buffer
from tensorforge.checkpoint.tensors import DTYPES, byte_view, is_direct

WORKERS = 4
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
    transfer = _Transfer(source, destinations)
    reads = _plan(source.manifest, destinations)
    meter = Meter(sum(read.length for read in reads), progress)

    def tasks() -> Iterator[Callable[[Bytes], None]]:
        for read in reads:

            def task(scratch: Bytes, read: RangeRead = read) -> None:
                transfer.run(read, scratch)
                meter.add(read.length)

            yield task

    workplace = functools.partial(block_buffer, guard)
    with torch.no_grad():
        run_parallel(tasks(), workplace, workers=workers, guard=guard, what=_READING)


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

    def run(self, read: RangeRead, scratch: Bytes) -> None:
        if len(read.chunks) == 1:
            chunk = read.chunks[0]
            memory = self._straight(chunk)
            if memory is not None:
                self._source.read_raw(chunk.name, chunk.chunk.data, memory.data)
                return
        room = scratch if read.length <= len(scratch) else np.empty(read.length, np.uint8)
        self._source.read_range(read.file, read.start, room[: read.length].data)
        for chunk in read.chunks:
            start = chunk.chunk.data.start - read.start
            self._deliver(chunk, room[start : start + chunk.chunk.data.length])

    def _straight(self, read: ChunkRead) -> Bytes | None:
        """The memory that a chunk can be read into as it is, if there is such."""
        delivery = read.deliveries[0]
        index, box = delivery.target.index, read.chunk.box
        destination = self._destinations[index]
        if (
            read.chunk.data.codec != RAW
            or len(read.deliveries) > 1
            or delivery.overlap != box
            or destination.tensor.dtype != DTYPES[read.tensor.dtype]
            or index not in self._memory
        ):
            return None
        position = box.run_in(destination.box)
        if position is None:
            return None
        start = position * ITEM_SIZES[read.tensor.dtype]
        return self._memory[index][start : start + read.chunk.data.length]

    def _deliver(self, read: ChunkRead, stored: Bytes) -> None:
        content = self._source.decode(read.name, read.tensor, read.chunk, stored.data)
        tensor = torch.frombuffer(content, dtype=DTYPES[read.tensor.dtype])
        tensor = tensor.reshape(read.chunk.shape)
        for delivery in read.deliveries:
            destination = self._destinations[delivery.target.index]
            part = tensor[delivery.overlap.slices_in(read.chunk.box)]
            destination.tensor[delivery.overlap.slices_in(destination.box)].copy_(part)
