"""Places every block of a trace with all lifetimes known in advance.

Blocks are placed one after the other, each at the lowest offset that is free during its lifetime. The
result depends on the order: large blocks first is good. If some blocks then end above the peak of bytes in
use, they are put first in the order, and all blocks are placed again. Training steps repeat, so a plan made
from one recorded run shows how small a pool for this model can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tensorforge.memory.traces.trace import Lifetime

if TYPE_CHECKING:
    import numpy as np

_ROUNDS = 4
_CLOSE_ENOUGH = 1.005


def plan_offsets(
    lifetimes: Sequence[Lifetime], *, granularity: int = 1
) -> tuple[dict[int, int], int]:
    """The offset of each block, and the bytes needed. Blocks with overlapping lifetimes never overlap."""
    lives = [life._replace(size=-(-life.size // granularity) * granularity) for life in lifetimes]
    bound = _peak(lives)
    best: tuple[dict[int, int], int] | None = None
    for order in (
        sorted(lives, key=lambda life: (-life.size, life.start - life.stop, life.start)),
        sorted(lives, key=lambda life: (-life.size * (life.stop - life.start), life.start)),
    ):
        for _ in range(_ROUNDS):
            placed = _place(order)
            needed = max((placed[life.block] + life.size for life in order), default=0)
            if best is None or needed < best[1]:
                best = placed, needed
            if needed <= bound * _CLOSE_ENOUGH:
                return best
            order = _outliers_first(order, placed, bound)
    assert best is not None, "at least one order was tried"  # noqa: S101
    return best


def _peak(lives: Sequence[Lifetime]) -> int:
    changes = [(life.start, life.size) for life in lives]
    changes += [(life.stop, -life.size) for life in lives]
    live = peak = 0
    for _, size in sorted(changes):
        live += size
        peak = max(peak, live)
    return peak


def _outliers_first(
    order: Sequence[Lifetime], placed: dict[int, int], bound: int
) -> list[Lifetime]:
    outliers = [life for life in order if placed[life.block] + life.size > bound]
    others = [life for life in order if placed[life.block] + life.size <= bound]
    return outliers + others


def _place(order: Sequence[Lifetime]) -> dict[int, int]:
    import numpy as np

    starts, stops, offsets, ends = (np.zeros(len(order), dtype=np.int64) for _ in range(4))
    placed: dict[int, int] = {}
    for index, life in enumerate(order):
        together = (starts[:index] < life.stop) & (stops[:index] > life.start)
        offset = _lowest_gap(offsets[:index][together], ends[:index][together], life.size)
        starts[index], stops[index] = life.start, life.stop
        offsets[index], ends[index] = offset, offset + life.size
        placed[life.block] = offset
    return placed


def _lowest_gap(
    offsets: np.ndarray[tuple[int], np.dtype[np.int64]],
    ends: np.ndarray[tuple[int], np.dtype[np.int64]],
    size: int,
) -> int:
    """The lowest offset at which `size` bytes are outside the given ranges, which may overlap."""
    import numpy as np

    if not len(offsets):
        return 0
    by_offset = np.argsort(offsets, kind="stable")
    reached = np.maximum.accumulate(ends[by_offset])
    before = np.concatenate(([0], reached[:-1]))
    gaps = np.flatnonzero(offsets[by_offset] - before >= size)
    return int(before[gaps[0]]) if len(gaps) else int(reached[-1])
