"""One torch storage and the three things an arena does with it: slice, move, show as a tensor."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import cast

import torch

from tensorforge.errors import CapacityError, InvalidInputError
from tensorforge.memory.compaction import Move

_CHUNK = 16 << 20


class RawMemory:
    """`capacity` bytes on a device; offset 0 has an address that is a multiple of `alignment`."""

    def __init__(
        self, capacity: int, device: torch.device, alignment: int, *, pin_memory: bool
    ) -> None:
        self.device = device
        self._storage = _reserve(capacity + alignment, device, pin_memory)
        self._base = -self._storage.data_ptr() % alignment

    def slice(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """A storage of its own over `nbytes` of this memory, which it keeps alive."""
        start = self._base + offset
        return cast("torch.UntypedStorage", self._storage[start : start + nbytes])

    def tensor(
        self, part: torch.UntypedStorage, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        """A contiguous tensor over a slice."""
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(part, 0, tuple(shape), _strides(shape))

    def move(self, move: Move) -> None:
        """Carry out one move of a compaction."""
        source, destination = self._base + move.source, self._base + move.destination
        if self.device.type == "cpu":
            address = self._storage.data_ptr()
            ctypes.memmove(address + destination, address + source, move.size)
        else:
            move_in_chunks(self._storage, source, destination, move.size)

    def release(self) -> None:
        """Let the memory go; slices that are still in use keep it."""
        self._storage = torch.empty(0, dtype=torch.uint8).untyped_storage()
        self._base = 0


def move_in_chunks(
    storage: torch.UntypedStorage, source: int, destination: int, size: int, chunk: int = _CHUNK
) -> None:
    """Move bytes down inside a storage on any device, although the two ranges may overlap.

    torch refuses to copy between overlapping ranges, so each chunk goes through a copy of its own.
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
                f"{device} has no {nbytes} bytes for an arena: {error}",
                requested=nbytes,
                available=0,
            ) from error
        raise InvalidInputError(
            f"no arena on {device} with pin_memory={pin_memory}: {error}"
        ) from error
    return memory.untyped_storage()


def bytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The bytes of a contiguous tensor."""
    if any(length < 0 for length in shape):
        raise InvalidInputError(f"shape = {tuple(shape)}: a length must not be negative")
    return math.prod(shape) * dtype.itemsize


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))
