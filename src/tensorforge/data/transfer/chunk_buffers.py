"""Memory for chunks that are on their way in, bounded: who finds no room waits, and so does its sender."""

from __future__ import annotations

import mmap
import threading
import time
from typing import Protocol

from tensorforge.errors import CapacityError, DeadlineExceededError, InvalidInputError
from tensorforge.memory.memory_pool import MemoryPool
from tensorforge.memory.pool.blocks import AllocationRequest, GpuDevice, align_up


class BufferHandle(Protocol):
    """A piece of memory that is lent."""

    def buffer(self) -> memoryview:
        """The bytes, writable."""
        ...

    def free(self) -> None:
        """Give it back."""
        ...


class BufferPool(Protocol):
    """Where chunk buffers come from; `tensorforge.memory.TensorArena` is one as well."""

    def acquire(self, nbytes: int, timeout: float) -> BufferHandle:
        """Lend `nbytes`, waiting for room; `DeadlineExceededError` after `timeout` seconds."""
        ...


class _Lent:
    def __init__(self, owner: HostBuffers, block_id: str, view: memoryview) -> None:
        self._owner, self._block_id, self._view = owner, block_id, view
        self._freed = False

    def buffer(self) -> memoryview:
        return self._view

    def free(self) -> None:
        if not self._freed:
            self._freed = True
            self._owner.give_back(self._block_id)


class HostBuffers:
    """Plain memory of `capacity` bytes, rounded up to pages, lent in pieces; safe to share between threads.

    A `MemoryPool` keeps the books. The memory is mapped once and used again and again, so it never grows
    beyond what was lent at one time.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InvalidInputError(f"capacity = {capacity}: must be at least 1 byte")
        self.capacity = align_up(capacity, mmap.PAGESIZE)
        self._memory = memoryview(mmap.mmap(-1, self.capacity))
        self._pool = MemoryPool(GpuDevice("host", self.capacity))
        self._changed = threading.Condition()
        self.peak_bytes = 0
        """The most that was ever lent at one time."""

    @property
    def lent_bytes(self) -> int:
        """How much is lent now, in whole pages."""
        return self._pool.stats().allocated_bytes

    def acquire(self, nbytes: int, timeout: float) -> BufferHandle:
        """Lend `nbytes`, waiting for room; `DeadlineExceededError` after `timeout` seconds."""
        if nbytes > self.capacity:
            raise CapacityError(
                f"{nbytes} bytes requested, but the pool has {self.capacity} in all",
                requested=nbytes,
                available=self.capacity,
            )
        request = AllocationRequest("chunk", nbytes, alignment=mmap.PAGESIZE, pinned=True)
        if complaint := request.complaint():
            raise InvalidInputError(complaint)
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                found = self._pool.allocate(request, time.monotonic())
                if found.block_id is not None and found.offset is not None:
                    self.peak_bytes = max(self.peak_bytes, self.lent_bytes)
                    view = self._memory[found.offset : found.offset + nbytes]
                    return _Lent(self, found.block_id, view)
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise DeadlineExceededError(
                        f"no {nbytes} bytes for a chunk within {timeout:g} s: "
                        f"{self.lent_bytes} of {self.capacity} are in use"
                    )

    def give_back(self, block_id: str) -> None:
        """Take a lent piece back; its handle calls this."""
        with self._changed:
            self._pool.free(block_id)
            self._changed.notify_all()
