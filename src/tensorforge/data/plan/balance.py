"""How many units each worker keeps and receives: loads differ by at most one, with the fewest moves.

A unit is a sample or a shard, given as a number in an interval set. The cost of every function depends on the
number of ranges and workers, not on the number of units.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tensorforge.data.plan.intervals import IntervalSet, Range, union
from tensorforge.data.plan.shards import quotas

_FEW_RANGES: Final = 8
"""A worker with at most this many ranges keeps those that it reads first; with more, the largest."""


def minimum_moves(held: Sequence[int], total: int) -> int:
    """The fewest units that must move so that the workers' shares of `total` differ by at most one.

    `held[i]` is how many units worker *i* holds. With `q, r = divmod(total, workers)` every worker ends
    with q units and r workers with one more; the fewest move if these r are workers that hold more than q.
    """
    share, rest = divmod(total, len(held))
    kept = sum(min(count, share) for count in held)
    return total - kept - min(rest, sum(count > share for count in held))


def fair_targets(held: Sequence[int], total: int) -> list[int]:
    """How many units each worker ends with, so that the fewest must move; ties go to the lower rank."""
    share, rest = divmod(total, len(held))
    targets = [share] * len(held)
    with_surplus = [i for i, count in enumerate(held) if count > share]
    others = [i for i, count in enumerate(held) if count <= share]
    for i in (with_surplus + others)[:rest]:
        targets[i] += 1
    return targets


def move_least(
    held: Sequence[IntervalSet], remaining: IntervalSet, *, merge: bool = False
) -> list[IntervalSet]:
    """Which units each worker ends with if the fewest move.

    Every worker keeps the first units that it holds, because it reads them first; so the units that move
    have the most time to arrive. Units that no worker keeps fill the deficits in order of rank.

    `merge` keeps the number of ranges small over many changes: a worker with many ranges gives up its
    smallest first, and a free range goes to the worker that holds an adjacent one, if that worker has room.
    """
    targets = fair_targets([part.size for part in held], remaining.size)
    keep = _keep_large if merge else IntervalSet.first
    kept = [keep(part, target) for part, target in zip(held, targets, strict=True)]
    deficits = [target - part.size for part, target in zip(kept, targets, strict=True)]
    pool: Sequence[Range] = (remaining - union(kept)).ranges
    received: list[list[Range]] = [[] for _ in held]
    if merge:
        pool = _join_neighbours(pool, kept, deficits, received)
    for more, rest in zip(received, _cut(pool, deficits), strict=True):
        more.extend(rest)
    return [
        IntervalSet.of([*part, *more]) if more else part
        for part, more in zip(kept, received, strict=True)
    ]


def _keep_large(part: IntervalSet, count: int) -> IntervalSet:
    """`count` units of `part`: the first ones, or, if it has many ranges, those of the largest."""
    if len(part.ranges) <= _FEW_RANGES:
        return part.first(count)
    kept: list[Range] = []
    for start, stop in sorted(part, key=lambda found: (found[0] - found[1], found[0])):
        if count > 0:
            kept.append((start, min(stop, start + count)))
            count -= stop - start
    return IntervalSet.of(kept)


def _join_neighbours(
    pool: Iterable[Range],
    kept: Sequence[IntervalSet],
    deficits: list[int],
    received: list[list[Range]],
) -> list[Range]:
    """Give free ranges to workers with a deficit that hold an adjacent range, and return the remaining ones.

    `deficits` and `received` are updated.
    """
    wanting = [(rank, part) for rank, part in enumerate(kept) if deficits[rank]]
    before = {stop: rank for rank, part in wanting for _, stop in part}
    after = {start: rank for rank, part in wanting for start, _ in part}
    left: list[Range] = []
    for start, stop in pool:
        low, high = start, stop
        if (rank := before.get(start)) is not None:
            low += min(deficits[rank], high - low)
            deficits[rank] -= low - start
            received[rank].append((start, low))
        if (rank := after.get(stop)) is not None:
            high -= min(deficits[rank], high - low)
            deficits[rank] -= stop - high
            received[rank].append((high, stop))
        if low < high:
            left.append((low, high))
    return left


def deal(remaining: IntervalSet, workers: int) -> list[IntervalSet]:
    """Contiguous units for each worker in order of rank, no matter which worker holds them now."""
    return [IntervalSet(tuple(part)) for part in _cut(remaining, quotas(remaining.size, workers))]


def _cut(pool: Iterable[Range], sizes: Sequence[int]) -> list[list[Range]]:
    """Split the ranges of `pool`, in order, into lists with these numbers of units."""
    result: list[list[Range]] = [[] for _ in sizes]
    index, room = -1, 0
    for start, stop in pool:
        while start < stop:
            while not room:
                index += 1
                room = sizes[index]
            end = min(stop, start + room)
            result[index].append((start, end))
            room -= end - start
            start = end
    return result
