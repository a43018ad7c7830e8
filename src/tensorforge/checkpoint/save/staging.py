"""Reused memory: blocks for the threads that write, and room for whole files in the background.

Fresh pages cost more than the copying itself, so both come from arenas that are kept. Addresses are aligned
for direct writes. A save that finds no free block waits for one: that is the limit on what saves use.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence

from tensorforge.checkpoint.format.file_layout import ALIGNMENT
from tensorforge.checkpoint.parallel import Guard, run_parallel
from tensorforge.checkpoint.save.file_image import Bytes, FileImage
from tensorforge.errors import CapacityError
from tensorforge.memory.arena.arena import TensorArena
from tensorforge.memory.arena.arena_block import ArenaBlock
from tensorforge.memory.arena.raw_memory import HUGE_PAGE

BLOCK_BYTES = 8 << 20
PIECE_BYTES = 2 << 20
"""What is written at once. Larger writes are slower: the bytes leave the processor's cache before the disk
takes them, and the threads wait for each other's."""
_BLOCKS = 16


def _arena(capacity: int) -> TensorArena:
    """Of huge pages: a disk takes so many segments of memory with one request, and a piece that lies in
    ordinary pages, scattered as they come, would need several requests."""
    return TensorArena(capacity, alignment=HUGE_PAGE, huge_pages=True)


_blocks = _arena(_BLOCKS * BLOCK_BYTES)


@contextlib.contextmanager
def block_buffer(guard: Guard) -> Iterator[Bytes]:
    """An aligned buffer of `BLOCK_BYTES` for one thread; waits until there is one."""
    with _blocks.acquire(BLOCK_BYTES, guard.remaining) as block:
        yield _bytes(block)


@contextlib.contextmanager
def piece_buffer(guard: Guard) -> Iterator[Bytes]:
    """An aligned buffer of `PIECE_BYTES` for one thread; waits until there is one."""
    with _blocks.acquire(PIECE_BYTES, guard.remaining) as block:
        yield _bytes(block)


def _bytes(block: ArenaBlock) -> Bytes:
    content: Bytes = block.tensor().numpy()
    return content


def blocks(size: int, starts: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
    """Start and length of each block of a file.

    A block ends where it must, or at the last of the chunks' `starts` before that, rounded down to whole units
    of direct writing: then all of a chunk, or nearly all, passes while its block is written.
    """
    start = 0
    while start < size:
        stop = min(start + BLOCK_BYTES, size)
        if stop < size:
            index = bisect.bisect_left(starts, stop + ALIGNMENT)
            cut = starts[index - 1] // ALIGNMENT * ALIGNMENT if index else 0
            stop = cut if cut > start else stop
        yield start, stop - start
        start = stop


def pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Start and length of each piece of a block."""
    for at in range(start, stop, PIECE_BYTES):
        yield at, min(PIECE_BYTES, stop - at)


def aligned(size: int) -> int:
    """The size rounded up to whole units of direct writing."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class StagingArea:
    """Memory that holds a rank's files between the copy and the write; kept from one save to the next."""

    def __init__(self) -> None:
        self._arena: TensorArena | None = None
        self._held: list[ArenaBlock] = []

    def stage(self, images: list[FileImage], guard: Guard, workers: int) -> None:
        """Copy everything that will be written; when this returns, the originals may change."""
        places = self._make_room([max(aligned(image.plan.size), ALIGNMENT) for image in images])
        tasks = [
            task
            for image, place in zip(images, places, strict=True)
            for task in _filling(image, place)
        ]
        run_parallel(tasks, contextlib.nullcontext, workers=workers, guard=guard, what="staging")
        for image, place in zip(images, places, strict=True):
            image.stage(place)

    def _make_room(self, sizes: list[int]) -> list[Bytes]:
        """Memory for files of these sizes; what the save before held is given back first."""
        self._give_back()
        try:
            return self._allocate(sizes)
        except CapacityError:
            # Too small, or somebody still looks at the old files: start over with a larger one.
            self.close()
            room = sum(-(-size // HUGE_PAGE) * HUGE_PAGE for size in sizes)
            self._arena = _arena(max(room, HUGE_PAGE))
            return self._allocate(sizes)

    def _allocate(self, sizes: list[int]) -> list[Bytes]:
        if self._arena is None:
            raise CapacityError("no memory yet", requested=sum(sizes), available=0)
        for size in sizes:
            self._held.append(self._arena.allocate(size))
        return [_bytes(block) for block in self._held]

    def _give_back(self) -> None:
        for block in self._held:
            block.free()
        self._held = []

    def close(self) -> None:
        """Let go of the memory."""
        self._held = []
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def _filling(image: FileImage, place: Bytes) -> Iterator[Callable[[None], None]]:
    for start, length in blocks(image.plan.size):

        def fill(_: None, start: int = start, length: int = length) -> None:
            image.fill(start, place[start : start + length])

        yield fill
    place[image.plan.size :] = 0
