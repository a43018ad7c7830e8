"""A pool of memory for threads to share: a block table behind one lock, with pressure and growth."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tensorforge.capacity import RollingWindow
from tensorforge.errors import InvalidInputError
from tensorforge.memory.finalizer_lock import FinalizerLock
from tensorforge.memory.pool.block_table import BlockTable
from tensorforge.memory.pool.blocks import (
    AllocationRequest,
    AllocationResult,
    GpuDevice,
    MemoryBlock,
    PoolStats,
    estimate_oom_seconds,
    memory_pressure,
)

_log = logging.getLogger(__name__)

_RATE_WINDOW_SECONDS = 60.0
_RATE_SAMPLES = 120


class HighWaterMark:
    """Detects that pressure rises to `mark`; again only after it has fallen below the mark."""

    __slots__ = ("_above", "callback", "mark")

    def __init__(self, mark: float, callback: Callable[[PoolStats], object]) -> None:
        if not 0 < mark <= 1:
            raise InvalidInputError(f"mark = {mark!r}: must be above 0 and at most 1")
        self.mark = mark
        self.callback = callback
        self._above = False

    def observe(self, pressure: float) -> bool:
        """Whether this pressure reaches the mark and the previous one did not."""
        was_above, self._above = self._above, pressure >= self.mark
        return self._above and not was_above


class MemoryPool:
    """Bookkeeping for the memory of one device. Safe to share between threads.

    Allocation is best fit, with the lowest offset among equals; freed neighbours merge at once. If there
    is no room, adjacent cached blocks of at most the request's priority are evicted, those with the fewest
    bytes. Pinned blocks are never evicted or moved. Requests smaller than `small_block` are placed at the
    top end of their hole.

    An unknown block is a `NotFoundError`; a transition that its status forbids is a `TransitionError`. No
    callback runs while the lock is held.
    """

    def __init__(self, device: GpuDevice, *, small_block: int = 0) -> None:
        self.device = device
        self._table = BlockTable(device.total_memory, small_block=small_block)
        self._lock = FinalizerLock()
        self._marks: list[HighWaterMark] = []
        self._growth = RollingWindow(_RATE_WINDOW_SECONDS)
        self._sampled_at: float | None = None
        self._sampled_bytes = 0

    def allocate(self, request: AllocationRequest, now: float) -> AllocationResult:
        """Allocate a block, or return the reason for a failure. The size is rounded up to the alignment."""
        with self._lock:
            result = self._table.allocate(request, now)
            self._sample_growth(now)
            due = self._reached_marks()
        for mark, stats in due:
            _notify(mark, stats)
        return result

    def free(self, block_id: str) -> None:
        """Free a block, pinned or not."""
        with self._lock:
            self._free(block_id)

    def free_later(self, block_id: str) -> None:
        """`free` for finalizers: it never waits, and it logs an unknown block instead of raising."""
        self._lock.later(lambda: self._free(block_id))

    def mark_cached(self, block_id: str) -> None:
        """Allow the eviction of a block when room is needed; pin the block to use it again."""
        with self._lock:
            self._table.mark_cached(block_id)

    def pin(self, block_id: str) -> None:
        """Forbid that a block is evicted or moved."""
        with self._lock:
            self._table.pin(block_id)

    def unpin(self, block_id: str) -> None:
        """Allow again that a pinned block is moved."""
        with self._lock:
            self._table.unpin(block_id)

    def touch(self, block_id: str, now: float) -> None:
        """Record that a block was used at `now`."""
        with self._lock:
            self._table.touch(block_id, now)

    def evict(self, needed: int) -> int:
        """Free cached blocks, least recently used first, until `needed` bytes are freed.

        Returns the bytes freed: more than `needed` if the last block was larger, fewer if no cached block
        is left.
        """
        with self._lock:
            before = self._table.in_use
            self._table.evict(needed)
            self._reached_marks()
            return before - self._table.in_use

    def defragment(self) -> int:
        """Move the blocks in use together and return how many were moved.

        Ids, sizes and alignments stay. This pool owns no bytes, so only offsets change.
        """
        with self._lock:
            moves = self._table.plan_compaction()
            self._table.apply(moves)
            return len(moves)

    def stats(self) -> PoolStats:
        """The current statistics."""
        with self._lock:
            return self._table.stats()

    def get_block(self, block_id: str) -> MemoryBlock | None:
        """The block of this id, or `None`."""
        with self._lock:
            return self._table.get(block_id)

    def blocks(self) -> list[MemoryBlock]:
        """Every block, free ones included, lowest offset first."""
        with self._lock:
            return self._table.blocks()

    def blocks_for_tensor(self, tensor_id: str) -> list[MemoryBlock]:
        """The blocks in use for a tensor, oldest first."""
        with self._lock:
            return self._table.blocks_for_tensor(tensor_id)

    def pressure(self) -> float:
        """The share of memory in use, from 0.0 to 1.0."""
        with self._lock:
            return memory_pressure(self._table.in_use, self._table.capacity)

    def on_high_water(self, mark: float, callback: Callable[[PoolStats], object]) -> None:
        """Call `callback` whenever an allocation raises the pressure to `mark`.

        It runs in the allocating thread, outside the lock, so it may use the pool. It runs again only after
        the pressure has been below the mark. An exception from it is logged.
        """
        watched = HighWaterMark(mark, callback)
        with self._lock:
            watched.observe(memory_pressure(self._table.in_use, self._table.capacity))
            self._marks.append(watched)

    def oom_seconds(self, now: float) -> float:
        """Seconds until the pool is full if it grows as in the last minute."""
        with self._lock:
            self._sample_growth(now)
            rate = self._growth.rate(now)
            return estimate_oom_seconds(self._table.capacity - self._table.in_use, rate)

    def _sample_growth(self, now: float) -> None:
        step = _RATE_WINDOW_SECONDS / _RATE_SAMPLES
        if self._sampled_at is None or not 0 <= now - self._sampled_at < step:
            self._growth.add(self._table.in_use - self._sampled_bytes, now)
            self._sampled_at, self._sampled_bytes = now, self._table.in_use

    def _free(self, block_id: str) -> None:
        self._table.free(block_id)
        self._reached_marks()

    def _reached_marks(self) -> list[tuple[HighWaterMark, PoolStats]]:
        """The marks that the current pressure has newly reached, with the statistics for their callbacks."""
        if not self._marks:
            return []
        pressure = memory_pressure(self._table.in_use, self._table.capacity)
        due = [mark for mark in self._marks if mark.observe(pressure)]
        return [(mark, self._table.stats()) for mark in due]


def _notify(mark: HighWaterMark, stats: PoolStats) -> None:
    try:
        mark.callback(stats)
    except Exception:  # noqa: BLE001  the allocation succeeded; raising here would lose the block
        _log.exception("the callback of the high-water mark %s failed", mark.mark)
