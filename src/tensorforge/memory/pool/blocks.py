"""The vocabulary of a pool: blocks, requests, results, statistics, and the arithmetic on them.

Sizes and offsets are in bytes, times in seconds of the caller's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from tensorforge.capacity import queue_pressure
from tensorforge.errors import InvalidInputError
from tensorforge.lifecycle import Lifecycle
from tensorforge.validation import finite_number, is_whole_number, whole_number


class BlockStatus(Enum):
    """The status of a block; every status but `FREE` means that the block is in use."""

    FREE = "free"
    ALLOCATED = "allocated"
    PINNED = "pinned"
    CACHED = "cached"


BLOCK_LIFECYCLE = Lifecycle(
    "a block",
    {
        BlockStatus.ALLOCATED: (BlockStatus.PINNED, BlockStatus.CACHED, BlockStatus.FREE),
        BlockStatus.PINNED: (BlockStatus.ALLOCATED, BlockStatus.FREE),
        BlockStatus.CACHED: (BlockStatus.PINNED, BlockStatus.FREE),
    },
)
"""The allowed transitions of a block. Pinning a cached block takes it back into use."""


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """A contiguous range of the pool, as it was at the time of the query."""

    block_id: str
    offset: int
    size: int
    status: BlockStatus
    tensor_id: str | None = None
    allocated_at: float = 0.0
    last_accessed: float = 0.0
    priority: int = 0
    alignment: int = 1

    @property
    def end(self) -> int:
        """The first offset after the block."""
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """The memory that a pool manages."""

    device_id: str
    total_memory: int
    memory_clock_mhz: int = 0
    compute_capability: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        whole_number("total_memory", self.total_memory, least=1)


@dataclass(frozen=True, slots=True)
class AllocationRequest:
    """A request for `size` bytes at a multiple of `alignment`, which must be a power of two.

    To make room, cached blocks of at most this `priority` may be evicted.
    """

    tensor_id: str
    size: int
    alignment: int = 1
    pinned: bool = False
    priority: int = 0

    def problem(self) -> str | None:
        """Why no pool can ever serve this request, or `None`."""
        if not is_whole_number(self.size) or self.size <= 0:
            return f"size = {self.size!r}: must be a positive whole number"
        if not is_power_of_two(self.alignment):
            return f"alignment = {self.alignment!r}: must be a power of two"
        return None


@dataclass(frozen=True, slots=True)
class AllocationResult:
    """The allocated block, or the error. `evicted` lists the blocks that were evicted to make room."""

    success: bool
    block_id: str | None = None
    offset: int | None = None
    actual_size: int | None = None
    error: str | None = None
    evicted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The statistics of a pool at one moment.

    `allocated_bytes` counts every block in use, with `pinned_bytes` and `cached_bytes` as parts of it;
    `allocated_bytes + free_bytes == total_bytes`. `block_count` includes free blocks, `allocation_count`
    does not.
    """

    total_bytes: int
    allocated_bytes: int
    free_bytes: int
    pinned_bytes: int
    cached_bytes: int
    fragmentation_ratio: float
    largest_free_block: int
    block_count: int
    allocation_count: int


def is_power_of_two(n: int) -> bool:
    """Whether `n` is 1, 2, 4, 8, …; nothing else is: not 0, no negative number, no boolean."""
    return is_whole_number(n) and n > 0 and n & (n - 1) == 0


def align_up(size: int, alignment: int) -> int:
    """The smallest multiple of `alignment` (a power of two) that is at least `size`."""
    if not is_power_of_two(alignment):
        raise InvalidInputError(f"alignment = {alignment!r}: must be a power of two")
    if size < 0:
        raise InvalidInputError(f"size = {size}: must not be negative")
    return (size + alignment - 1) & -alignment


def share_outside_largest(largest_free: int, total_free: int) -> float:
    """`1 - largest_free / total_free`; 0.0 if nothing is free."""
    return 1.0 - largest_free / total_free if total_free else 0.0


def fragmentation_ratio(blocks: Iterable[MemoryBlock]) -> float:
    """The share of free memory outside the largest free block; 0.0 if nothing is free."""
    free = [block.size for block in blocks if block.status is BlockStatus.FREE]
    return share_outside_largest(max(free, default=0), sum(free))


def best_fit_block(blocks: Iterable[MemoryBlock], size: int, alignment: int) -> str | None:
    """The id of the smallest free block that can hold `size` bytes at a multiple of `alignment`.

    Among equals the one with the lowest offset; `None` if no block can.
    """
    fitting = [
        (block.size, block.offset, block.block_id)
        for block in blocks
        if block.status is BlockStatus.FREE
        and align_up(block.offset, alignment) + size <= block.end
    ]
    return min(fitting)[2] if fitting else None


def eviction_candidates(blocks: Iterable[MemoryBlock]) -> list[str]:
    """The ids of the cached blocks, least recently used first; equals keep their order."""
    cached = (block for block in blocks if block.status is BlockStatus.CACHED)
    return [block.block_id for block in sorted(cached, key=lambda block: block.last_accessed)]


def memory_pressure(allocated: int, total: int) -> float:
    """How full the pool is, from 0.0 to 1.0; a pool without memory is full."""
    return queue_pressure(allocated, total)


def should_defragment(stats: PoolStats, frag_threshold: float, min_block_size: int) -> bool:
    """Whether fragmentation is above the threshold and no free block has `min_block_size` bytes."""
    return stats.fragmentation_ratio > frag_threshold and stats.largest_free_block < min_block_size


def estimate_oom_seconds(free_bytes: int, alloc_rate_bytes_per_sec: float) -> float:
    """Seconds until `free_bytes` are used up; infinity when the rate is not positive."""
    if free_bytes < 0:
        raise InvalidInputError(f"free_bytes = {free_bytes}: must not be negative")
    if not alloc_rate_bytes_per_sec > 0:
        return math.inf
    return free_bytes / alloc_rate_bytes_per_sec


def optimal_pool_size(peak_usage: int, headroom_factor: float, page_size: int) -> int:
    """`peak_usage * headroom_factor`, rounded up to whole pages."""
    if peak_usage < 0:
        raise InvalidInputError(f"peak_usage = {peak_usage}: must not be negative")
    finite_number("headroom_factor", headroom_factor, least=1)
    if page_size <= 0:
        raise InvalidInputError(f"page_size = {page_size}: must be positive")
    return -(-math.ceil(peak_usage * headroom_factor) // page_size) * page_size
