"""Bounded, reusable memory: a pool that keeps the books, an arena with real bytes, traces to learn from.

    blocks      the vocabulary and its arithmetic        freespace   holes, indexed for best fit
    compaction  the plan of a defragmentation            table       the pool as a pure machine
    guard       the lock                                 pool        the pool that threads share
    rawmemory   one torch storage                        handle      the owner's side of a block
    arena       a pool over real memory                  trace       a recorded history of allocations
    record      traces of PyTorch programs               snapshot    PyTorch's own format, in and out
    policies    ways to place blocks                     offline     with the whole future known
    replay      a trace through a policy                 advise      what a trace says about its pool
    plots       pictures of a replay                     library     the traces that come along

What needs torch, and what the pool itself does not need, is imported when it is first asked for.
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
