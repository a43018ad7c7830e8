"""Bounded memory for chunks being received: a receiver without room waits, and so does its sender."""

from __future__ import annotations

import mmap
import threading
import time
from typing import Protocol

from tensorforge.errors import CapacityError, DeadlineExceededError, InvalidInputError
from tensorforge.memory.memory_pool import MemoryPool
from tensorforge.memory.pool.blocks import AllocationRequest, GpuDevice, align_up


class BufferHandle(Protocol):
    """Memory lent by a pool."""

    def buffer(self) -> memoryview:
        """The bytes, writable."""
        ...

    def free(self) -> None:
        """Return the memory to the pool."""
        ...


class BufferPool(Protocol):
    """A source of chunk buffers: `HostBuffers`, or `tensorforge.memory.TensorArena`."""

    def acquire(self, nbytes: int, timeout: float) -> BufferHandle:
        """Lend `nbytes`, waiting for room; `DeadlineExceededError` after `timeout` seconds."""
        ...


class _LentBuffer:
    def __init__(self, owner: HostBuffers, block_id: str, view: memoryview) -> None:
        self._owner, self._block_id, self._view = owner, block_id, view
        self._freed = False

    def buffer(self) -> memoryview:
        return self._view

    def free(self) -> None:
        if not self._freed:
            self._freed = True
            self._owner.release(self._block_id)


class HostBuffers:
    """`capacity` bytes of main memory, rounded up to pages, lent in pieces. Safe to share between threads.

    A `MemoryPool` decides which piece is lent. The memory is mapped once and reused.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InvalidInputError(f"capacity = {capacity}: must be at least 1 byte")
        self.capacity = align_up(capacity, mmap.PAGESIZE)
        self._memory = memoryview(mmap.mmap(-1, self.capacity))
        self._pool = MemoryPool(GpuDevice("host", self.capacity))
        self._changed = threading.Condition()
        self.peak_bytes = 0
        """The most bytes that were ever lent at the same time."""

    @property
    def lent_bytes(self) -> int:
        """How many bytes are lent now, in whole pages."""
        return self._pool.stats().allocated_bytes

    def acquire(self, nbytes: int, timeout: float) -> BufferHandle:
        """Lend `nbytes`, waiting for room; `DeadlineExceededError` after `timeout` seconds."""
        if nbytes > self.capacity:
            raise CapacityError(
                f"{nbytes} bytes requested, but the pool has only {self.capacity}",
                requested=nbytes,
                available=self.capacity,
            )
        request = AllocationRequest("chunk", nbytes, alignment=mmap.PAGESIZE, pinned=True)
        if problem := request.problem():
            raise InvalidInputError(problem)
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                found = self._pool.allocate(request, time.monotonic())
                if found.block_id is not None and found.offset is not None:
                    self.peak_bytes = max(self.peak_bytes, self.lent_bytes)
                    view = self._memory[found.offset : found.offset + nbytes]
                    return _LentBuffer(self, found.block_id, view)
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise DeadlineExceededError(
                        f"no room for a chunk of {nbytes} bytes within {timeout:g} s: "
                        f"{self.lent_bytes} of {self.capacity} are in use"
                    )

    def release(self, block_id: str) -> None:
        """Free a lent piece and wake those who wait; its handle calls this."""
        with self._changed:
            self._pool.free(block_id)
            self._changed.notify_all()
