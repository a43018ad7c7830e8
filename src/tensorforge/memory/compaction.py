"""Where live blocks go when they are pushed together: a plan, made before anything moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tensorforge.memory.blocks import BlockStatus, MemoryBlock
from tensorforge.memory.freespace import FreeSpace


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
            target = (cursor + block.alignment - 1) & -block.alignment
            cursor = target + block.size
        if target != block.offset:
            moves.append(Move(block.block_id, block.offset, target, block.size))
    return tuple(moves)
