"""Plans where blocks in use move to bring free space together; nothing moves here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tensorforge.memory.pool.blocks import BlockStatus, MemoryBlock, align_up
from tensorforge.memory.pool.free_space import FreeSpace


@dataclass(frozen=True, slots=True)
class Move:
    """One block moves to a lower offset: `destination < source`; the two ranges may overlap."""

    block_id: str
    source: int
    destination: int
    size: int


def plan_compaction(blocks: Iterable[MemoryBlock], capacity: int) -> tuple[Move, ...]:
    """The moves that bring every block in use towards offset 0; pinned blocks stay.

    A block moves into the smallest lower gap that holds it at its alignment, or down to the end of the
    blocks placed before it. The moves are safe in the given order: each destination lies below its source,
    in space that is free or that earlier moves have left.
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
            target = align_up(cursor, block.alignment)
            cursor = target + block.size
        if target != block.offset:
            moves.append(Move(block.block_id, block.offset, target, block.size))
    return tuple(moves)


def plan_room(
    blocks: Iterable[MemoryBlock], capacity: int, size: int, alignment: int
) -> tuple[Move, ...]:
    """The moves of the fewest bytes that join adjacent holes into one that can hold a request.

    The blocks between the holes move down to the lowest hole; no block moves past a pinned one. Empty if
    that cannot make room. As with `plan_compaction`, the moves are safe in the given order.
    """
    in_use = (block for block in blocks if block.status is not BlockStatus.FREE)
    best: tuple[int, tuple[Move, ...]] | None = None
    for start, end, stretch in _stretches(sorted(in_use, key=lambda b: b.offset), capacity):
        for cost, first, last in _slides(start, end, stretch, size):
            if best is None or cost < best[0]:
                low = stretch[first - 1].end if first else start
                high = stretch[last].offset if last < len(stretch) else end
                moves, cursor = _slide(stretch[first:last], low)
                if align_up(cursor, alignment) + size <= high:
                    best = cost, moves
    return best[1] if best is not None else ()


def _stretches(
    ordered: Sequence[MemoryBlock], capacity: int
) -> Iterator[tuple[int, int, list[MemoryBlock]]]:
    """The ranges between pinned blocks: start, end and the blocks in it."""
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
    """`(bytes, first, last)` for blocks `stretch[first:last]` whose holes together have `size` bytes."""
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
            return  # one hole alone is large enough


def _slide(stretch: Sequence[MemoryBlock], cursor: int) -> tuple[tuple[Move, ...], int]:
    """The moves that place the blocks one after the other from `cursor` on, and the end of the last."""
    moves = []
    for block in stretch:
        target = align_up(cursor, block.alignment)
        if target != block.offset:
            moves.append(Move(block.block_id, block.offset, target, block.size))
        cursor = target + block.size
    return tuple(moves), cursor
