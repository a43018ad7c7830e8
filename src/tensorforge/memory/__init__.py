"""Bounded, reusable memory: a pool that keeps the books, an arena with real bytes, traces to learn from.

    blocks      the vocabulary and its arithmetic        freespace   holes, indexed for best fit
    compaction  the plan of a defragmentation            table       the pool as a pure machine
    guard       the lock                                 pool        the pool that threads share

What needs torch is imported when it is first asked for.
"""

from tensorforge.memory.blocks import (
    BLOCK_LIFECYCLE,
    AllocationRequest,
    AllocationResult,
    BlockStatus,
    GpuDevice,
    MemoryBlock,
    PoolStats,
    align_up,
    best_fit_block,
    estimate_oom_seconds,
    eviction_candidates,
    fragmentation_ratio,
    is_power_of_two,
    memory_pressure,
    optimal_pool_size,
    should_defragment,
)
from tensorforge.memory.pool import MemoryPool

__all__ = [
    "BLOCK_LIFECYCLE",
    "AllocationRequest",
    "AllocationResult",
    "BlockStatus",
    "GpuDevice",
    "MemoryBlock",
    "MemoryPool",
    "PoolStats",
    "align_up",
    "best_fit_block",
    "estimate_oom_seconds",
    "eviction_candidates",
    "fragmentation_ratio",
    "is_power_of_two",
    "memory_pressure",
    "optimal_pool_size",
    "should_defragment",
]
