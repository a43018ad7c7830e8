"""Reused memory: blocks for the threads that write, and room for whole files in the background.

Fresh pages cost more than the copying itself, so both are kept. Addresses are aligned for direct writes.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator

import numpy as np

from tensorforge.checkpoint.image import Bytes, FileImage
from tensorforge.checkpoint.layout import ALIGNMENT
from tensorforge.checkpoint.parallel import Guard, run_parallel

BLOCK_BYTES = 8 << 20
_KEPT_BLOCKS = 8

_lock = threading.Lock()
_free: list[Bytes] = []


@contextlib.contextmanager
def block_buffer() -> Iterator[Bytes]:
    """An aligned buffer of `BLOCK_BYTES` for one thread."""
    with _lock:
        buffer = _free.pop() if _free else allocate(BLOCK_BYTES)
    yield buffer
    # Not returned after an error: a write that hangs may still be using it.
    with _lock:
        if len(_free) < _KEPT_BLOCKS:
            _free.append(buffer)


def allocate(size: int) -> Bytes:
    """Aligned memory that lives as long as the array."""
    return np.frombuffer(mmap.mmap(-1, max(size, ALIGNMENT)), np.uint8)


def blocks(size: int) -> Iterator[tuple[int, int]]:
    """Start and length of each block of a file."""
    for start in range(0, size, BLOCK_BYTES):
        yield start, min(BLOCK_BYTES, size - start)


def aligned(size: int) -> int:
    """The size rounded up to whole units of direct writing."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class StagingArea:
    """Memory that holds a rank's files between the copy and the write; kept from one save to the next."""

    def __init__(self) -> None:
        self._memory: Bytes = allocate(0)

    def stage(self, images: list[FileImage], guard: Guard, workers: int) -> None:
        """Copy everything that will be written; when this returns, the originals may change."""
        memory = self._room(sum(aligned(image.plan.size) for image in images))
        tasks: list[Callable[[None], None]] = []
        places, start = [], 0
        for image in images:
            place = memory[start : start + aligned(image.plan.size)]
            start += len(place)
            places.append(place)
            tasks.extend(_filling(image, place))
        run_parallel(tasks, contextlib.nullcontext, workers=workers, guard=guard, what="staging")
        for image, place in zip(images, places, strict=True):
            image.stage(place)

    def _room(self, size: int) -> Bytes:
        if len(self._memory) < size:
            self._memory = allocate(0)  # let go of the old memory before asking for more
            self._memory = allocate(size)
        return self._memory


def _filling(image: FileImage, place: Bytes) -> Iterator[Callable[[None], None]]:
    for start, length in blocks(image.plan.size):

        def fill(_: None, start: int = start, length: int = length) -> None:
            image.fill(start, place[start : start + length])

        yield fill
    place[image.plan.size :] = 0
