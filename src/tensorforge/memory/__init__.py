"""Bounded, reusable memory: a pool that decides where blocks go, an arena of real bytes, and recorded traces.

`pool/` is pure bookkeeping of offsets. A request (`blocks`) goes to the block table (`block_table`), which
takes the best-fitting hole (`free_space`), evicts cached blocks, or moves blocks (`defragmentation`). Two
classes own a block table and a lock. `memory_pool.MemoryPool` adds threads, high-water marks and rates.
`arena.TensorArena` adds real bytes: it slices one torch storage, moves bytes as the table says, and pins a
block while a tensor views it. A finalizer may free a block in any thread at any time; `finalizer_lock`
makes that safe. The pool and the lock are outside `pool/` because they hold a lock, which a pure folder may
not.

`traces/` follows the life of a trace: recorded from a program (`recording`) or read from a PyTorch snapshot
(`torch_snapshot`), replayed through a placement policy (`replay`), judged (`pool_advice`) and drawn
(`plots`). Modules that need torch, and those that `MemoryPool` does not need, are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tensorforge.memory.memory_pool import MemoryPool
from tensorforge.memory.pool.blocks import (
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
from tensorforge.memory.traces.trace import AllocationTrace

if TYPE_CHECKING:
    from tensorforge.memory.arena.arena import TensorArena
    from tensorforge.memory.arena.arena_block import ArenaBlock
    from tensorforge.memory.traces.bundled_traces import open_trace
    from tensorforge.memory.traces.plots import save_plot
    from tensorforge.memory.traces.pool_advice import Advice, advise_pool
    from tensorforge.memory.traces.recording import record_allocations
    from tensorforge.memory.traces.replay import Replay, replay_bounded, replay_trace
    from tensorforge.memory.traces.torch_snapshot import save_snapshot, snapshot_of_replay

_ON_DEMAND = {
    "Advice": "traces.pool_advice",
    "ArenaBlock": "arena.arena_block",
    "Replay": "traces.replay",
    "TensorArena": "arena.arena",
    "advise_pool": "traces.pool_advice",
    "open_trace": "traces.bundled_traces",
    "record_allocations": "traces.recording",
    "replay_bounded": "traces.replay",
    "replay_trace": "traces.replay",
    "save_plot": "traces.plots",
    "save_snapshot": "traces.torch_snapshot",
    "snapshot_of_replay": "traces.torch_snapshot",
}

__all__ = [
    "BLOCK_LIFECYCLE",
    "Advice",
    "AllocationRequest",
    "AllocationResult",
    "AllocationTrace",
    "ArenaBlock",
    "BlockStatus",
    "GpuDevice",
    "MemoryBlock",
    "MemoryPool",
    "PoolStats",
    "Replay",
    "TensorArena",
    "advise_pool",
    "align_up",
    "best_fit_block",
    "estimate_oom_seconds",
    "eviction_candidates",
    "fragmentation_ratio",
    "is_power_of_two",
    "memory_pressure",
    "open_trace",
    "optimal_pool_size",
    "record_allocations",
    "replay_bounded",
    "replay_trace",
    "save_plot",
    "save_snapshot",
    "should_defragment",
    "snapshot_of_replay",
]


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return getattr(importlib.import_module(f"{__name__}.{_ON_DEMAND[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
