"""Which chunks a rank needs for the boxes that it holds, and in which reads they come. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tensorforge.checkpoint.format.boxes import Box
from tensorforge.checkpoint.format.manifest import ChunkMetadata, TensorMetadata

LARGE_CHUNK = 1 << 20
MAX_READ = 4 << 20
MAX_GAP = 64 << 10


@dataclass(frozen=True, slots=True)
class Target:
    """A box of the tensor `name` that somebody wants; `index` is the caller's to find it again."""

    index: int
    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class Delivery:
    """The part of a chunk that goes to a target."""

    target: Target
    overlap: Box


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A chunk that is needed, and by whom: it is read and verified once, whole."""

    tensor: TensorMetadata
    name: str
    chunk: ChunkMetadata
    deliveries: tuple[Delivery, ...]


@dataclass(frozen=True, slots=True)
class RangeRead:
    """One read of a file: a large chunk, or small ones that lie side by side."""

    file: int
    start: int
    length: int
    chunks: tuple[ChunkRead, ...]


def plan_reads(tensors: Mapping[str, TensorMetadata], targets: Iterable[Target]) -> list[RangeRead]:
    """The reads that fill every target, in the order in which they lie in the files.

    Every chunk comes once, however many targets it serves; reads never overlap.
    """
    wanted: dict[str, list[Target]] = {}
    for target in targets:
        wanted.setdefault(target.name, []).append(target)
    needed = [
        read for name, group in wanted.items() for read in _needed(name, tensors[name], group)
    ]
    needed.sort(key=lambda read: (read.chunk.data.file, read.chunk.data.start))
    return coalesce(_united(needed))


def _united(needed: list[ChunkRead]) -> list[ChunkRead]:
    """Tied tensors have the same chunks under several names: read them once, for all of them."""
    united: list[ChunkRead] = []
    for read in needed:
        last = united[-1] if united else None
        if last and last.chunk == read.chunk and last.tensor.dtype == read.tensor.dtype:
            both = (*last.deliveries, *read.deliveries)
            united[-1] = dataclasses.replace(last, deliveries=both)
        else:
            united.append(read)
    return united


def _needed(name: str, tensor: TensorMetadata, targets: list[Target]) -> Iterable[ChunkRead]:
    whole = Box.whole(tensor.shape)
    wanted = [(target, target.box == whole) for target in targets]
    for chunk in tensor.chunks:
        box = chunk.box
        deliveries = tuple(
            Delivery(target, overlap)
            for target, wants_all in wanted
            if (overlap := box if wants_all else box.intersect(target.box)) is not None
        )
        if deliveries:
            yield ChunkRead(tensor, name, chunk, deliveries)


def coalesce(needed: list[ChunkRead]) -> list[RangeRead]:
    """Join small neighbours into one read; chunks come sorted by file and position."""
    reads: list[RangeRead] = []
    group: list[ChunkRead] = []
    for chunk in needed:
        if group and not _fits(group, chunk):
            reads.append(_range(group))
            group = []
        group.append(chunk)
    if group:
        reads.append(_range(group))
    return reads


def _fits(group: list[ChunkRead], chunk: ChunkRead) -> bool:
    first, last, new = group[0].chunk.data, group[-1].chunk.data, chunk.chunk.data
    if new.file != first.file or max(last.length, new.length) >= LARGE_CHUNK:
        return False
    gap = new.start - (last.start + last.length)
    return 0 <= gap <= MAX_GAP and new.start + new.length - first.start <= MAX_READ


def _range(group: list[ChunkRead]) -> RangeRead:
    start = group[0].chunk.data.start
    stop = group[-1].chunk.data.start + group[-1].chunk.data.length
    return RangeRead(group[0].chunk.data.file, start, stop - start, tuple(group))
