"""The memory pool that threads share."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tensorforge.capacity import RollingWindow
from tensorforge.errors import InvalidInputError
from tensorforge.memory.finalizer_lock import Guard
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
    """Notices when pressure rises to `mark`; once, until it has fallen below again."""

    __slots__ = ("_above", "callback", "mark")

    def __init__(self, mark: float, callback: Callable[[PoolStats], object]) -> None:
        if not 0 < mark <= 1:
            raise InvalidInputError(f"mark = {mark!r}: must be above 0 and at most 1")
        self.mark = mark
        self.callback = callback
        self._above = False

    def observe(self, pressure: float) -> bool:
        """Whether this is the moment that the mark was reached."""
        was_above, self._above = self._above, pressure >= self.mark
        return self._above and not was_above


class MemoryPool:
    """Bookkeeping for the memory of one device, shared by threads.

    Allocation is best fit, the lowest offset among equals; freed neighbours merge at once. If there
    is no room, cached blocks of at most the request's priority are evicted: those neighbours that cost the
    fewest bytes. Pinned blocks are never evicted or moved. Requests smaller than `small_block` are placed at
    the top end of the hole they go into.

    An unknown block is a `NotFoundError`, a move that its state forbids a `TransitionError`. One lock
    guards everything; no callback runs under it.
    """

    def __init__(self, device: GpuDevice, *, small_block: int = 0) -> None:
        self.device = device
        self._table = BlockTable(device.total_memory, small_block=small_block)
        self._guard = Guard()
        self._marks: list[HighWaterMark] = []
        self._growth = RollingWindow(_RATE_WINDOW_SECONDS)
        self._sampled_at: float | None = None
        self._sampled_bytes = 0

    def allocate(self, request: AllocationRequest, now: float) -> AllocationResult:
        """Give the request a block, or say why not. Its size is rounded up to its alignment."""
        with self._guard:
            result = self._table.allocate(request, now)
            self._sample_growth(now)
            due = self._reached_marks()
        for mark, stats in due:
            _notify(mark, stats)
        return result

    def free(self, block_id: str) -> None:
        """Give a block back, pinned or not."""
        with self._guard:
            self._free(block_id)

    def free_later(self, block_id: str) -> None:
        """`free` for finalizers: never waits; an unknown block is logged, not raised."""
        self._guard.later(lambda: self._free(block_id))

    def mark_cached(self, block_id: str) -> None:
        """Let a block be evicted when room is needed; pin it to use it again."""
        with self._guard:
            self._table.mark_cached(block_id)

    def pin(self, block_id: str) -> None:
        """Keep a block from being evicted or moved."""
        with self._guard:
            self._table.pin(block_id)

    def unpin(self, block_id: str) -> None:
        """Let a pinned block be moved again."""
        with self._guard:
            self._table.unpin(block_id)

    def touch(self, block_id: str, now: float) -> None:
        """Note that a block was used at `now`."""
        with self._guard:
            self._table.touch(block_id, now)

    def evict(self, needed: int) -> int:
        """Free cached blocks, least recently used first, until `needed` bytes came free.

        Answers the bytes freed: more than `needed` if the last block was larger, fewer if no cached block
        is left.
        """
        with self._guard:
            before = self._table.in_use
            self._table.evict(needed)
            self._reached_marks()
            return before - self._table.in_use

    def defragment(self) -> int:
        """Push the blocks in use together and answer how many moved.

        Ids, sizes and alignments stay; this pool owns no bytes, so offsets are all that changes.
        """
        with self._guard:
            moves = self._table.plan_compaction()
            self._table.apply(moves)
            return len(moves)

    def stats(self) -> PoolStats:
        """The figures of this moment."""
        with self._guard:
            return self._table.stats()

    def get_block(self, block_id: str) -> MemoryBlock | None:
        """The block of this id, or `None`."""
        with self._guard:
            return self._table.get(block_id)

    def blocks(self) -> list[MemoryBlock]:
        """Every block, free ones included, lowest offset first."""
        with self._guard:
            return self._table.blocks()

    def blocks_for_tensor(self, tensor_id: str) -> list[MemoryBlock]:
        """The blocks in use for a tensor, oldest first."""
        with self._guard:
            return self._table.blocks_for_tensor(tensor_id)

    def pressure(self) -> float:
        """The share of memory in use, from 0.0 to 1.0."""
        with self._guard:
            return memory_pressure(self._table.in_use, self._table.capacity)

    def on_high_water(self, mark: float, callback: Callable[[PoolStats], object]) -> None:
        """Call `callback` whenever an allocation takes the pressure to `mark`.

        It runs in the allocating thread, outside the lock, so it may use the pool. It comes again only after
        the pressure was below the mark in between. An exception from it is logged.
        """
        watched = HighWaterMark(mark, callback)
        with self._guard:
            watched.observe(memory_pressure(self._table.in_use, self._table.capacity))
            self._marks.append(watched)

    def oom_seconds(self, now: float) -> float:
        """Seconds until the pool is full if it fills as it did in the last minute."""
        with self._guard:
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
        """The marks that this change of pressure has reached; those above it are armed again."""
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
