"""The memory of an arena: one torch storage that is sliced, moved within, and viewed as tensors."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from typing import cast

import torch

from tensorforge.errors import CapacityError, InvalidInputError
from tensorforge.memory.pool.defragmentation import Move

HUGE_PAGE = 2 << 20

_CHUNK = 16 << 20

_system = ctypes.CDLL(None)
_system.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class RawMemory:
    """`capacity` bytes on a device; the address of offset 0 is a multiple of `alignment`.

    `huge_pages` asks the system for pages of 2 MiB for memory on the CPU. They take fewer page faults, and
    a disk transfers them in fewer requests. A system without them uses ordinary pages.
    """

    def __init__(
        self,
        capacity: int,
        device: torch.device,
        alignment: int,
        *,
        pin_memory: bool,
        huge_pages: bool = False,
    ) -> None:
        self.device = device
        self._storage = _reserve(capacity + alignment, device, pin_memory)
        self._base = -self._storage.data_ptr() % alignment
        if huge_pages and device.type == "cpu":
            _ask_for_huge_pages(self._storage.data_ptr(), self._storage.nbytes())

    def slice(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """A new storage over `nbytes` of this memory, which it keeps alive."""
        start = self._base + offset
        return cast("torch.UntypedStorage", self._storage[start : start + nbytes])

    def tensor(
        self, part: torch.UntypedStorage, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        """A contiguous tensor over a slice."""
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(part, 0, tuple(shape), _strides(shape))

    def move(self, move: Move) -> None:
        """Copy a block's bytes to its destination."""
        source, destination = self._base + move.source, self._base + move.destination
        if self.device.type == "cpu":
            address = self._storage.data_ptr()
            ctypes.memmove(address + destination, address + source, move.size)
        else:
            move_in_chunks(self._storage, source, destination, move.size)

    def release(self) -> None:
        """Release the memory; slices that are still in use keep it alive."""
        self._storage = torch.empty(0, dtype=torch.uint8).untyped_storage()
        self._base = 0


def move_in_chunks(
    storage: torch.UntypedStorage, source: int, destination: int, size: int, chunk: int = _CHUNK
) -> None:
    """Move bytes to a lower offset of a storage on any device; the two ranges may overlap.

    torch refuses to copy between overlapping ranges, so each chunk is copied through a clone.
    """
    for done in range(0, size, chunk):
        length = min(chunk, size - done)
        copied = storage[source + done : source + done + length].clone()
        storage[destination + done : destination + done + length].copy_(copied)


def _reserve(nbytes: int, device: torch.device, pin_memory: bool) -> torch.UntypedStorage:
    try:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pin_memory)
    except (RuntimeError, AssertionError) as error:
        if "allocate" in str(error) or "out of memory" in str(error):
            raise CapacityError(
                f"{device} cannot allocate {nbytes} bytes for an arena: {error}",
                requested=nbytes,
                available=0,
            ) from error
        raise InvalidInputError(
            f"cannot create an arena on {device} with pin_memory={pin_memory}: {error}"
        ) from error
    return memory.untyped_storage()


def _ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Advise the system to use huge pages; if it cannot, nothing happens."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    start = -(-address // HUGE_PAGE) * HUGE_PAGE
    length = (address + nbytes - start) // HUGE_PAGE * HUGE_PAGE
    if advice is not None and length > 0:
        _system.madvise(start, length, advice)


def bytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The number of bytes of a contiguous tensor."""
    if any(length < 0 for length in shape):
        raise InvalidInputError(f"shape = {tuple(shape)}: a length must not be negative")
    return math.prod(shape) * dtype.itemsize


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))
