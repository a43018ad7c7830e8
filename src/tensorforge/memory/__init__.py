"""Bounded, reusable memory: a pool that keeps the books, an arena with real bytes, traces to learn from.

    blocks      the vocabulary and its arithmetic        freespace   holes, indexed for best fit
    compaction  the plan of a defragmentation            table       the pool as a pure machine
    guard       the lock                                 pool        the pool that threads share
    rawmemory   one torch storage                        handle      the owner's side of a block
    arena       a pool over real memory that lends tensors

What needs torch is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from tensorforge.memory.arena import TensorArena
    from tensorforge.memory.handle import ArenaBlock

_NEEDS_TORCH = {
    "ArenaBlock": "tensorforge.memory.handle",
    "TensorArena": "tensorforge.memory.arena",
}

__all__ = [
    "BLOCK_LIFECYCLE",
    "AllocationRequest",
    "AllocationResult",
    "ArenaBlock",
    "BlockStatus",
    "GpuDevice",
    "MemoryBlock",
    "MemoryPool",
    "PoolStats",
    "TensorArena",
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


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
