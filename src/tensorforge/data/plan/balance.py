"""Who keeps and who receives how much: balance within one unit, with the fewest units moved.

Units are numbers in interval sets: samples, or whole shards. The work depends on the ranges and the
workers, never on how many units the ranges contain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tensorforge.data.plan.intervals import IntervalSet, Range, union
from tensorforge.data.plan.shards import quotas

_FEW_RANGES: Final = 8
"""So many ranges of a worker are no burden: it keeps those that it reads first."""


def minimum_moves(held: Sequence[int], total: int) -> int:
    """The fewest units that must move until `total` units are balanced within one over the workers.

    `held[i]` is what worker *i* has already. With `q, r = divmod(total, workers)` every worker ends with
    q units and r of them with one more; to keep most, those r places go to workers with more than q.
    """
    share, rest = divmod(total, len(held))
    kept = sum(min(count, share) for count in held)
    return total - kept - min(rest, sum(count > share for count in held))


def fair_targets(held: Sequence[int], total: int) -> list[int]:
    """How many units each worker ends with, chosen so that the fewest must move.

    Ties go to the lower rank.
    """
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
    """What each worker has in the end, when as little as possible moves.

    Everybody keeps the beginning of what it holds, which it needs first; so what moves is what has most
    time to arrive. What nobody keeps fills the deficits in order of rank.

    With `merge` the ranges stay few over many changes: who holds many gives its smallest away first, and what
    is free goes to the worker that holds what lies next to it, if that one has room.
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
    """`count` units of `part`: its beginning, or of many ranges the largest."""
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
    """Let workers with a deficit grow into the free ranges beside theirs, and return what is left of those.

    `deficits` and `received` are brought up to date.
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
    """Neighbouring units for each worker, in order of rank, whoever holds them now."""
    return [IntervalSet(tuple(part)) for part in _cut(remaining, quotas(remaining.size, workers))]


def _cut(pool: Iterable[Range], sizes: Sequence[int]) -> list[list[Range]]:
    """The ranges of `pool`, in order, cut into runs of these sizes; together they are the pool."""
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
