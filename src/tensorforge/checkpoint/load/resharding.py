"""Plans a load: which chunks a rank needs for the boxes that it wants, and in which reads they come. Pure."""

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
class WantedBox:
    """A box of the tensor `name` to load; `index` identifies it for the caller."""

    index: int
    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class Overlap:
    """The box of elements that a chunk and a wanted box have in common."""

    wanted: WantedBox
    box: Box


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A chunk to read, and which wanted boxes get elements of it. A chunk is read and verified once."""

    tensor: TensorMetadata
    name: str
    chunk: ChunkMetadata
    overlaps: tuple[Overlap, ...]


@dataclass(frozen=True, slots=True)
class RangeRead:
    """One read of a range of a file: a large chunk, or several small ones next to each other."""

    file: int
    start: int
    length: int
    chunks: tuple[ChunkRead, ...]


def plan_reads(
    tensors: Mapping[str, TensorMetadata], wanted: Iterable[WantedBox]
) -> list[RangeRead]:
    """The reads that fill every wanted box, ordered by file and position.

    Every chunk is read once, however many wanted boxes it overlaps; reads never overlap.
    """
    by_tensor: dict[str, list[WantedBox]] = {}
    for each in wanted:
        by_tensor.setdefault(each.name, []).append(each)
    needed = [
        read for name, group in by_tensor.items() for read in _needed(name, tensors[name], group)
    ]
    needed.sort(key=lambda read: (read.chunk.data.file, read.chunk.data.start))
    return coalesce(_merge_ties(needed))


def _merge_ties(needed: list[ChunkRead]) -> list[ChunkRead]:
    """One read for each chunk: tied tensors have the same chunks under several names."""
    merged: list[ChunkRead] = []
    for read in needed:
        last = merged[-1] if merged else None
        if last and last.chunk == read.chunk and last.tensor.dtype == read.tensor.dtype:
            merged[-1] = dataclasses.replace(last, overlaps=(*last.overlaps, *read.overlaps))
        else:
            merged.append(read)
    return merged


def _needed(name: str, tensor: TensorMetadata, wanted: list[WantedBox]) -> Iterable[ChunkRead]:
    full = Box.full(tensor.shape)
    boxes = [(each, each.box == full) for each in wanted]
    for chunk in tensor.chunks:
        box = chunk.box
        overlaps = tuple(
            Overlap(each, common)
            for each, wants_all in boxes
            if (common := box if wants_all else box.intersect(each.box)) is not None
        )
        if overlaps:
            yield ChunkRead(tensor, name, chunk, overlaps)


def coalesce(needed: list[ChunkRead]) -> list[RangeRead]:
    """Join small chunks that are close together into one read; the chunks come sorted by file and position."""
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
