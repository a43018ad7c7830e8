"""Where live blocks go when they are pushed together: a plan, made before anything moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tensorforge.memory.pool.blocks import BlockStatus, MemoryBlock
from tensorforge.memory.pool.free_space import FreeSpace


@dataclass(frozen=True, slots=True)
class Move:
    """One block's way down: `destination < source`; the two ranges may overlap."""

    block_id: str
    source: int
    destination: int
    size: int


def plan_compaction(blocks: Iterable[MemoryBlock], capacity: int) -> tuple[Move, ...]:
    """The moves that push every block in use towards offset 0; pinned blocks stay.

    A block goes into the smallest gap below that holds it at its alignment, or slides down to the
    end of what was placed before. Carried out in the given order, no move overwrites bytes that a later
    one still needs: each destination lies below its source, in space that earlier moves have left.
    """
    gaps: FreeSpace | None = None
    moves: list[Move] = []
    cursor = 0
    in_use = (block for block in blocks if block.status is not BlockStatus.FREE)
    for block in sorted(in_use, key=lambda block: block.offset):
        if block.status is BlockStatus.PINNED:
            if block.offset > cursor:
                gaps = gaps or FreeSpace.around(capacity, [(0, capacity)])
                gaps.give(cursor, block.offset - cursor)
            cursor = block.end
            continue
        target = gaps.take(block.size, block.alignment) if gaps is not None else None
        if target is None:
            target = _aligned(cursor, block.alignment)
            cursor = target + block.size
        if target != block.offset:
            moves.append(Move(block.block_id, block.offset, target, block.size))
    return tuple(moves)


def plan_room(
    blocks: Iterable[MemoryBlock], capacity: int, size: int, alignment: int
) -> tuple[Move, ...]:
    """The moves of the fewest bytes that bring neighbouring holes together to hold a request.

    Only blocks between two pinned ones slide, down to the lowest of the holes; empty if that cannot make
    room. As with `plan_compaction`, the moves are safe in the given order.
    """
    in_use = (block for block in blocks if block.status is not BlockStatus.FREE)
    best: tuple[int, tuple[Move, ...]] | None = None
    for start, end, stretch in _stretches(sorted(in_use, key=lambda b: b.offset), capacity):
        for cost, first, last in _slides(start, end, stretch, size):
            if best is None or cost < best[0]:
                low = stretch[first - 1].end if first else start
                high = stretch[last].offset if last < len(stretch) else end
                moves, cursor = _slide(stretch[first:last], low)
                if _aligned(cursor, alignment) + size <= high:
                    best = cost, moves
    return best[1] if best is not None else ()


def _stretches(
    ordered: Sequence[MemoryBlock], capacity: int
) -> Iterator[tuple[int, int, list[MemoryBlock]]]:
    """The ranges between pinned blocks, with the blocks in them."""
    start = 0
    stretch: list[MemoryBlock] = []
    for block in ordered:
        if block.status is BlockStatus.PINNED:
            yield start, block.offset, stretch
            start, stretch = block.end, []
        else:
            stretch.append(block)
    yield start, capacity, stretch


def _slides(
    start: int, end: int, stretch: Sequence[MemoryBlock], size: int
) -> Iterator[tuple[int, int, int]]:
    """Blocks `stretch[first:last]` with holes of `size` bytes around and between them; their bytes first."""
    edges = [start, *(block.end for block in stretch)]
    holes = [
        (block.offset if block is not None else end) - edge
        for edge, block in zip(edges, (*stretch, None), strict=True)
    ]
    last = cost = 0
    room = holes[0]
    for first in range(len(holes)):
        while room < size and last < len(stretch):
            cost += stretch[last].size
            last += 1
            room += holes[last]
        if room < size:
            return
        if last > first:
            yield cost, first, last
            cost -= stretch[first].size
            room -= holes[first]
        else:
            return  # a hole is large enough by itself


def _slide(stretch: Sequence[MemoryBlock], cursor: int) -> tuple[tuple[Move, ...], int]:
    """The moves that put the blocks one after the other from `cursor` on, and where they end."""
    moves = []
    for block in stretch:
        target = _aligned(cursor, block.alignment)
        if target != block.offset:
            moves.append(Move(block.block_id, block.offset, target, block.size))
        cursor = target + block.size
    return tuple(moves), cursor


def _aligned(offset: int, alignment: int) -> int:
    return (offset + alignment - 1) & -alignment
