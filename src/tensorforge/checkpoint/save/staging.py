"""Memory of saves and loads: buffers for threads, and copies of files for saves in the background.

New pages cost more time than copying, so this memory comes from arenas that are reused. Addresses are aligned
for direct writes. A thread waits until a buffer is free, which limits the memory of all saves together.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence

from tensorforge.checkpoint.format.file_layout import ALIGNMENT
from tensorforge.checkpoint.parallel import Deadline, run_parallel
from tensorforge.checkpoint.save.file_contents import Bytes, FileContents
from tensorforge.errors import CapacityError
from tensorforge.memory.arena.arena import TensorArena
from tensorforge.memory.arena.arena_block import ArenaBlock
from tensorforge.memory.arena.raw_memory import HUGE_PAGE

BLOCK_BYTES = 8 << 20
WRITE_BYTES = 2 << 20
"""The size of one write. Larger writes are slower: their bytes leave the processor's cache before they reach
the disk, and the threads wait for each other."""
_BLOCKS = 16


def _arena(capacity: int) -> TensorArena:
    """An arena of huge pages. A disk accepts a limited number of memory ranges in one request, and a buffer of
    ordinary pages, which are not adjacent in physical memory, would need several requests."""
    return TensorArena(capacity, alignment=HUGE_PAGE, huge_pages=True)


_blocks = _arena(_BLOCKS * BLOCK_BYTES)


@contextlib.contextmanager
def block_buffer(deadline: Deadline) -> Iterator[Bytes]:
    """An aligned buffer of `BLOCK_BYTES` for one thread; waits until one is free."""
    with _blocks.acquire(BLOCK_BYTES, deadline.remaining) as block:
        yield _bytes(block)


@contextlib.contextmanager
def write_buffer(deadline: Deadline) -> Iterator[Bytes]:
    """An aligned buffer of `WRITE_BYTES` for one thread; waits until one is free."""
    with _blocks.acquire(WRITE_BYTES, deadline.remaining) as block:
        yield _bytes(block)


def _bytes(block: ArenaBlock) -> Bytes:
    content: Bytes = block.tensor().numpy()
    return content


def blocks(size: int, starts: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
    """Start and length of each block of a file, where `starts` are the starts of its chunks.

    A block has at most `BLOCK_BYTES`. If possible it ends at the start of a chunk, rounded down to a multiple
    of `ALIGNMENT`, so that a chunk is in one block, except for a few bytes.
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


def writes(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Start and length of each write of a block."""
    for at in range(start, stop, WRITE_BYTES):
        yield at, min(WRITE_BYTES, stop - at)


def aligned(size: int) -> int:
    """The size rounded up to a multiple of `ALIGNMENT`, the unit of direct writes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class StagingArea:
    """Memory for copies of a rank's files, from `stage` until they are written; the next save reuses it."""

    def __init__(self) -> None:
        self._arena: TensorArena | None = None
        self._allocated: list[ArenaBlock] = []

    def stage(self, files: list[FileContents], deadline: Deadline, workers: int) -> None:
        """Copy the bytes of the files; when this returns, the caller may change the tensors."""
        copies = self._allocate([max(aligned(file.plan.size), ALIGNMENT) for file in files])
        tasks = [
            task
            for file, memory in zip(files, copies, strict=True)
            for task in _copy_tasks(file, memory)
        ]
        run_parallel(
            tasks, contextlib.nullcontext, workers=workers, deadline=deadline, what="staging"
        )
        for file, memory in zip(files, copies, strict=True):
            file.stage(memory)

    def _allocate(self, sizes: list[int]) -> list[Bytes]:
        """Memory for files of these sizes, in place of that of the save before."""
        for block in self._allocated:
            block.free()
        self._allocated = []
        try:
            return self._allocate_in_arena(sizes)
        except CapacityError:
            # The arena is too small, or the files of the save before are still in use: make a new arena.
            self.close()
            capacity = sum(-(-size // HUGE_PAGE) * HUGE_PAGE for size in sizes)
            self._arena = _arena(max(capacity, HUGE_PAGE))
            return self._allocate_in_arena(sizes)

    def _allocate_in_arena(self, sizes: list[int]) -> list[Bytes]:
        if self._arena is None:
            raise CapacityError("no memory yet", requested=sum(sizes), available=0)
        for size in sizes:
            self._allocated.append(self._arena.allocate(size))
        return [_bytes(block) for block in self._allocated]

    def close(self) -> None:
        """Free the memory."""
        self._allocated = []
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def _copy_tasks(file: FileContents, memory: Bytes) -> Iterator[Callable[[None], None]]:
    for start, length in blocks(file.plan.size):

        def copy(_: None, start: int = start, length: int = length) -> None:
            file.copy(start, memory[start : start + length])

        yield copy
    memory[file.plan.size :] = 0
