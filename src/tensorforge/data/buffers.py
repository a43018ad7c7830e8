"""Memory for chunks that are on their way in, bounded: who finds no room waits, and so does its sender."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from tensorforge.errors import CapacityError, DeadlineExceededError, InvalidInputError


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
    def __init__(self, pool: HostBuffers, data: bytearray, nbytes: int) -> None:
        self._pool, self._data, self._nbytes = pool, data, nbytes
        self._freed = False

    def buffer(self) -> memoryview:
        return memoryview(self._data)[: self._nbytes]

    def free(self) -> None:
        if not self._freed:
            self._freed = True
            self._pool.give_back(self._data)


class HostBuffers:
    """At most `capacity` bytes of plain memory, reused. Safe to share between threads."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InvalidInputError(f"capacity = {capacity}: must be at least 1 byte")
        self.capacity = capacity
        self._changed = threading.Condition()
        self._lent_bytes = 0
        self._idle: list[bytearray] = []

    @property
    def lent_bytes(self) -> int:
        """How much is lent now."""
        return self._lent_bytes

    def acquire(self, nbytes: int, timeout: float) -> BufferHandle:
        """Lend `nbytes`, waiting for room; `DeadlineExceededError` after `timeout` seconds."""
        if nbytes > self.capacity:
            raise CapacityError(
                f"{nbytes} bytes requested, but the pool has {self.capacity} in all",
                requested=nbytes,
                available=self.capacity,
            )
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._lent_bytes + nbytes > self.capacity:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise DeadlineExceededError(
                        f"no {nbytes} bytes for a chunk within {timeout:g} s: "
                        f"{self._lent_bytes} of {self.capacity} are in use"
                    )
            self._lent_bytes += nbytes
            data = self._reuse(nbytes)
            return _Lent(self, data, nbytes)

    def _reuse(self, nbytes: int) -> bytearray:
        for index, data in enumerate(self._idle):
            if len(data) == nbytes:
                return self._idle.pop(index)
        self._idle.clear()
        return bytearray(nbytes)

    def give_back(self, data: bytearray) -> None:
        """Take a lent buffer back; its handle calls this."""
        with self._changed:
            self._lent_bytes -= len(data)
            self._idle.append(data)
            self._changed.notify_all()
