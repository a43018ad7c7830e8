"""Judges a pool by a trace: whether the trace fits, how large the pool must be, what fragments it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

from tensorforge.errors import InvalidInputError
from tensorforge.memory.pool.blocks import estimate_oom_seconds, memory_pressure, optimal_pool_size
from tensorforge.memory.pool.placement_policies import GRANULARITY, OFFLINE
from tensorforge.memory.traces.replay import Replay, replay_bounded, replay_trace
from tensorforge.memory.traces.trace import AllocationTrace, Lifetime
from tensorforge.statistics import percentile

_DEFAULT_POLICY = "best-fit"
_CULPRITS = 8


@dataclass(frozen=True, slots=True)
class Culprit:
    """The blocks of one label that separated holes when best fit needed the most memory.

    `hole_bytes` is the free space directly above these blocks.
    """

    label: str
    blocks: int
    block_bytes: int
    hole_bytes: int


@dataclass(frozen=True, slots=True)
class Advice:
    """What a trace says about the pool that it needs; all sizes are in bytes.

    `smallest_pool` was found by replaying the trace in it. `growth_per_second` counts bytes that stay in
    use; at that rate a pool of `capacity` is full after `oom_seconds` (infinity without growth). `pressure`
    is the median, the 95th percentile and the maximum of bytes in use divided by `capacity`. At `worst_time`
    best fit needed the most memory; `worst_waste` bytes of it were holes.
    """

    trace: str
    peak_live: int
    smallest_pool: int
    smallest_with_compaction: int
    smallest_planned: int
    recommended_pool: int
    capacity: int
    fits: bool
    first_failure: str | None
    pressure: tuple[float, float, float]
    growth_per_second: float
    oom_seconds: float
    worst_waste: int
    worst_time: float
    culprits: tuple[Culprit, ...]


def advise_pool(
    trace: AllocationTrace,
    *,
    capacity: int | None = None,
    headroom: float = 1.1,
    page_size: int = 2 << 20,
) -> Advice:
    """Judge a pool of `capacity` bytes, by default the recommended size, for this trace."""
    if not trace.events:
        raise InvalidInputError(f"the trace {trace.name!r} is empty")
    if capacity is not None and capacity <= 0:
        raise InvalidInputError(f"capacity = {capacity}: must be positive")
    result = replay_trace(trace, _DEFAULT_POLICY)
    smallest = smallest_pool(trace, result.peak_reserved)
    recommended = optimal_pool_size(smallest, headroom, page_size)
    judged = capacity if capacity is not None else recommended
    verdict = replay_bounded(trace, judged)
    live = trace.live_bytes()
    shares = [memory_pressure(nbytes, judged) for nbytes in live]
    growth = growth_per_second(trace)
    worst = result.reserved.index(result.peak_reserved)
    return Advice(
        trace=trace.name,
        peak_live=max(live),
        smallest_pool=smallest,
        smallest_with_compaction=_smallest_with_compaction(trace),
        smallest_planned=replay_trace(trace, OFFLINE).peak_reserved,
        recommended_pool=recommended,
        capacity=judged,
        fits=verdict.fits,
        first_failure=verdict.reason,
        pressure=(percentile(shares, 50), percentile(shares, 95), max(shares)),
        growth_per_second=growth,
        oom_seconds=estimate_oom_seconds(max(0, judged - max(live)), growth),
        worst_waste=result.peak_reserved - live[worst],
        worst_time=trace.events[worst].time,
        culprits=fragmentation_sources(trace, result, worst),
    )


def smallest_pool(trace: AllocationTrace, enough: int) -> int:
    """A capacity in which best fit serves the trace while a slightly smaller one fails.

    The search starts at `enough`. Best fit places blocks differently in another capacity, so a still
    smaller one may happen to suffice.
    """
    step = GRANULARITY
    while not replay_bounded(trace, enough).fits:
        enough = -(-enough * 33 // 32 // step) * step
    low, high = _rounded_peak(trace) - step, enough
    while high - low > max(step, high // 2048):
        middle = (low + high) // 2 // step * step
        if replay_bounded(trace, middle).fits:
            high = middle
        else:
            low = middle
    return high


def growth_per_second(trace: AllocationTrace) -> float:
    """The bytes per second that are allocated and stay in use.

    These are the bytes allocated between 40 % and 65 % of the events and still in use at 90 %. By then the
    program has set itself up, training steps have freed their memory, and the program has not begun to end.
    A trace should have at least four steps.
    """
    start, stop, judged = (len(trace) * percent // 100 for percent in (40, 65, 90))
    kept = sum(
        life.size for life in trace.lifetimes() if start <= life.start < stop and life.stop > judged
    )
    seconds = trace.events[stop].time - trace.events[start].time if trace.events else 0.0
    return kept / seconds if seconds > 0 else 0.0


def fragmentation_sources(
    trace: AllocationTrace, result: Replay, event: int
) -> tuple[Culprit, ...]:
    """The labels whose blocks separate holes just after `event`, those with the most free bytes first."""
    alive = [life for life in trace.lifetimes() if life.start <= event < life.stop]
    alive.sort(key=lambda life: result.position(life.block))
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for life, above in itertools.pairwise(alive):
        hole = _hole_between(life, above, result)
        if hole >= GRANULARITY:
            entry = sums[life.label]
            entry[0] += 1
            entry[1] += life.size
            entry[2] += hole
    culprits = [Culprit(label or "(unknown)", *entry) for label, entry in sums.items()]
    return tuple(sorted(culprits, key=lambda c: (-c.hole_bytes, c.label))[:_CULPRITS])


def _hole_between(life: Lifetime, above: Lifetime, result: Replay) -> int:
    end = result.position(life.block) + -(-life.size // GRANULARITY) * GRANULARITY
    return result.position(above.block) - end


def _rounded_peak(trace: AllocationTrace) -> int:
    live = peak = 0
    for event in trace.events:
        nbytes = -(-abs(event.size) // GRANULARITY) * GRANULARITY
        live += nbytes if event.size > 0 else -nbytes
        peak = max(peak, live)
    return peak


def _smallest_with_compaction(trace: AllocationTrace) -> int:
    """With compaction the rounded peak suffices; replaying the trace in it confirms that."""
    capacity = _rounded_peak(trace)
    verdict = replay_bounded(trace, capacity, compact=True)
    return capacity if verdict.fits else smallest_pool(trace, capacity)
