"""Who keeps and who receives how much: balance within one unit, with the fewest units moved.

Units are numbers in interval sets: samples, or whole shards. The work depends on the ranges and the
workers, never on how many units the ranges contain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tensorforge.data.intervals import IntervalSet, Range, union
from tensorforge.data.shards import quotas


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


def move_least(held: Sequence[IntervalSet], remaining: IntervalSet) -> list[IntervalSet]:
    """What each worker has in the end, when as little as possible moves.

    Everybody keeps the beginning of what it holds, which it needs first; so what moves is what has most
    time to arrive. What nobody keeps fills the deficits in order of rank.
    """
    targets = fair_targets([part.size for part in held], remaining.size)
    kept = [part.first(target) for part, target in zip(held, targets, strict=True)]
    deficits = [target - part.size for part, target in zip(kept, targets, strict=True)]
    received = _cut(remaining - union(kept), deficits)
    return [
        IntervalSet.of([*part, *more]) if more else part
        for part, more in zip(kept, received, strict=True)
    ]


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
