"""An arena: one torch storage, lent out in blocks.

Tensors are made over slices of the storage, not as slices of a tensor: each has a storage of its own
size, so that `torch.save` and `deepcopy` write the block and not the arena. A block with a living view,
be it a tensor, one derived from it, a numpy array or a memoryview, counts as pinned: it is not moved,
evicted or used again before the last of them is gone.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import NoReturn, Self

import torch

from tensorforge.errors import (
    CapacityError,
    ClosedError,
    ConfigurationError,
    DeadlineExceededError,
    InvalidInputError,
)
from tensorforge.memory.arena.arena_block import ArenaBlock, BlockRecord
from tensorforge.memory.arena.raw_memory import RawMemory, bytes_of
from tensorforge.memory.finalizer_lock import Guard
from tensorforge.memory.pool.block_table import BlockTable
from tensorforge.memory.pool.blocks import (
    BLOCK_LIFECYCLE,
    AllocationRequest,
    BlockStatus,
    MemoryBlock,
    PoolStats,
    align_up,
    is_power_of_two,
)
from tensorforge.memory.pool.defragmentation import Move


class TensorArena:
    """`capacity` bytes of real memory on `device`, lent as tensors; safe for threads.

    Every block starts at an address that is a multiple of `alignment` and takes a multiple of it. Requests
    below `small_block` bytes are kept at the top end, away from the large ones. `huge_pages` asks the system
    for pages of 2 MiB, which suits large blocks that are used again and again.
    """

    def __init__(
        self,
        capacity: int,
        *,
        device: str | torch.device = "cpu",
        alignment: int = 512,
        pin_memory: bool = False,
        small_block: int = 0,
        huge_pages: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity <= 0:
            raise ConfigurationError("capacity", capacity, "must be a positive number of bytes")
        if not is_power_of_two(alignment):
            raise ConfigurationError("alignment", alignment, "must be a power of two")
        self.device = torch.device(device)
        self.alignment = alignment
        self.capacity = align_up(capacity, alignment)
        self._memory = RawMemory(
            self.capacity, self.device, alignment, pin_memory=pin_memory, huge_pages=huge_pages
        )
        self._table = BlockTable(self.capacity, small_block=small_block)
        self._records: dict[str, BlockRecord] = {}
        self._guard = Guard()
        self._waiting: deque[SimpleQueue[None]] = deque()
        self._clock = clock
        self._closed = False

    def allocate(self, nbytes: int, *, tensor_id: str = "", priority: int = 0) -> ArenaBlock:
        """A block of `nbytes`, now; a `CapacityError` if there is no room for it."""
        with self._guard:
            record = self._try_allocate(nbytes, tensor_id, priority)
            if isinstance(record, str):
                self._refuse(nbytes, record)
        return ArenaBlock(self, record)

    def acquire(
        self, nbytes: int, timeout: float, *, tensor_id: str = "", priority: int = 0
    ) -> ArenaBlock:
        """A block of `nbytes`, waiting up to `timeout` seconds for room.

        Those who wait are served in the order they came; if enough is free but in pieces, blocks
        without views are moved together. A block that could never fit is a `CapacityError` at once; no room in
        time is a `DeadlineExceededError`.
        """
        deadline = time.monotonic() + timeout
        turn: SimpleQueue[None] = SimpleQueue()
        with self._guard:
            self._require_possible(nbytes)
            self._waiting.append(turn)
            self._wake()
        try:
            while True:
                expired = not _woken(turn, deadline - time.monotonic())
                with self._guard:
                    record = self._serve(turn, nbytes, tensor_id, priority)
                if record is not None:
                    return ArenaBlock(self, record)
                if expired:
                    raise DeadlineExceededError(
                        f"no room for {nbytes} bytes within {timeout:g} s in an arena of {self.capacity}"
                    )
        finally:
            with self._guard:
                self._waiting.remove(turn)
                self._wake()

    def lend(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, tensor_id: str = ""
    ) -> torch.Tensor:
        """A tensor with undefined contents whose block comes back by itself when its last view dies.

        No room is a `CapacityError`. A tensor without elements takes no block.
        """
        nbytes = bytes_of(shape, dtype)
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        with self._guard:
            record = self._try_allocate(nbytes, tensor_id, 0)
            if isinstance(record, str):
                self._refuse(nbytes, record)
            tensor = self._make_view(record, dtype, shape)
            record.fate = "lent"
        return tensor

    def free(self, handle: ArenaBlock) -> None:
        """Give a block back: at once, or when its last view dies."""
        if handle._arena is not self:  # noqa: SLF001  a handle and its arena are one unit
            raise InvalidInputError(f"{handle.block_id} belongs to another arena")
        with self._guard:
            record = handle._record  # noqa: SLF001
            self._require_live(record)
            self._drop(record)

    def evict(self, needed: int) -> int:
        """Free cached blocks, least recently used first, until `needed` bytes came free."""
        with self._guard:
            self._require_open()
            before = self._table.in_use
            self._forget(self._table.evict(needed), "evicted")
            self._wake()
            return before - self._table.in_use

    def defragment(self) -> int:
        """Move the blocks that have no living view together, bytes and all; answers how many moved.

        Other threads wait meanwhile.
        """
        with self._guard:
            self._require_open()
            moved = self._carry_out(self._table.plan_compaction())
            self._wake()
            return moved

    def stats(self) -> PoolStats:
        """The figures of this moment; blocks with living views count as pinned."""
        with self._guard:
            self._require_open()
            return self._table.stats()

    def blocks(self) -> list[MemoryBlock]:
        """Every block, free ones included, lowest offset first."""
        with self._guard:
            self._require_open()
            return self._table.blocks()

    def close(self) -> None:
        """Take no more requests and let the memory go once the last view of it is dead."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            self._forget(tuple(self._records), "of a closed arena")
            self._memory.release()
            for turn in self._waiting:
                turn.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _try_allocate(self, nbytes: int, tensor_id: str, priority: int) -> BlockRecord | str:
        """A new block's record, or the reason why there is none."""
        self._require_possible(nbytes)
        request = AllocationRequest(
            tensor_id, nbytes, alignment=self.alignment, pinned=False, priority=priority
        )
        result = self._table.allocate(request, self._clock())
        self._forget(result.evicted, "evicted")
        if result.block_id is None:
            return result.error or "no room"
        record = self._records[result.block_id] = BlockRecord(result.block_id, nbytes)
        return record

    def _refuse(self, nbytes: int, reason: str) -> NoReturn:
        stats = self._table.stats()
        raise CapacityError(reason, requested=nbytes, available=stats.largest_free_block)

    def _serve(
        self, turn: SimpleQueue[None], nbytes: int, tensor_id: str, priority: int
    ) -> BlockRecord | None:
        """Try for the first in the line; compact if that may help."""
        self._require_open()
        if self._waiting[0] is not turn:
            return None
        record = self._try_allocate(nbytes, tensor_id, priority)
        if isinstance(record, str) and self._room_in_pieces(nbytes):
            self._carry_out(self._table.plan_room(nbytes, self.alignment))
            record = self._try_allocate(nbytes, tensor_id, priority)
        return None if isinstance(record, str) else record

    def _room_in_pieces(self, nbytes: int) -> bool:
        stats = self._table.stats()
        return stats.free_bytes + stats.cached_bytes >= align_up(nbytes, self.alignment)

    def _view(
        self, record: BlockRecord, dtype: torch.dtype, shape: Sequence[int] | None
    ) -> torch.Tensor:
        if shape is None:
            if record.nbytes % dtype.itemsize:
                raise InvalidInputError(f"{record.nbytes} bytes are no whole number of {dtype}")
            shape = (record.nbytes // dtype.itemsize,)
        wanted = bytes_of(shape, dtype)
        if wanted > record.nbytes:
            raise InvalidInputError(
                f"{tuple(shape)} of {dtype} needs {wanted} bytes, but {record.block_id} has {record.nbytes}"
            )
        with self._guard:
            self._require_live(record)
            return self._make_view(record, dtype, shape)

    def _make_view(
        self, record: BlockRecord, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        part = record.view() if record.view is not None else None
        if part is None:
            part = self._slice(record)
            record.view = weakref.ref(part, self._on_death(record))
            record.views += 1
            if record.views == 1 and record.wish is not BlockStatus.PINNED:
                self._table.pin(record.block_id)
        self._table.touch(record.block_id, self._clock())
        return self._memory.tensor(part, dtype, shape)

    def _on_death(self, record: BlockRecord) -> Callable[[object], None]:
        """What to do when a view's storage dies: queue, as this may be a finalizer in any thread."""
        guard, method = self._guard, weakref.WeakMethod(self._view_ended)

        def ended(_: object) -> None:
            view_ended = method()
            if view_ended is not None:  # otherwise the arena itself is gone
                guard.later(functools.partial(view_ended, record))

        return ended

    def _slice(self, record: BlockRecord) -> torch.UntypedStorage:
        return self._memory.slice(self._table.offset_of(record.block_id), record.nbytes)

    def _view_ended(self, record: BlockRecord) -> None:
        record.views -= 1
        if record.views or record.block_id not in self._records:
            return
        if record.fate is not None:
            self._release(record)
            return
        if record.wish is not BlockStatus.PINNED:
            self._table.unpin(record.block_id)
        if record.wish is BlockStatus.CACHED:
            self._table.mark_cached(record.block_id)
        self._wake()

    def _change(self, record: BlockRecord, wish: BlockStatus) -> None:
        """Set what the owner wants; while views are alive they keep the block pinned all the same."""
        apply = {
            BlockStatus.PINNED: self._table.pin,
            BlockStatus.ALLOCATED: self._table.unpin,
            BlockStatus.CACHED: self._table.mark_cached,
        }[wish]
        with self._guard:
            self._require_live(record)
            record.wish = BLOCK_LIFECYCLE.require(record.wish, wish)
            if not record.views:
                apply(record.block_id)
                self._wake()

    def _drop_later(self, record: BlockRecord) -> None:
        """A handle died unfreed; this may be inside a finalizer."""
        self._guard.later(lambda: self._drop(record) if record.fate is None else None)

    def _drop(self, record: BlockRecord) -> None:
        record.fate = "freed"
        if not record.views:
            self._release(record)

    def _release(self, record: BlockRecord) -> None:
        self._table.free(record.block_id)
        del self._records[record.block_id]
        self._wake()

    def _forget(self, block_ids: Sequence[str], fate: str) -> None:
        for block_id in block_ids:
            self._records.pop(block_id).fate = fate

    def _wake(self) -> None:
        if self._waiting:
            self._waiting[0].put(None)

    def _carry_out(self, moves: tuple[Move, ...]) -> int:
        for move in moves:
            self._memory.move(move)
        self._table.apply(moves)
        return len(moves)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the arena is closed")

    def _require_possible(self, nbytes: int) -> None:
        self._require_open()
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes <= 0:
            raise InvalidInputError(f"nbytes = {nbytes!r}: must be a positive whole number")
        if nbytes > self.capacity:
            raise CapacityError(
                f"{nbytes} bytes can never fit into an arena of {self.capacity}",
                requested=nbytes,
                available=self.capacity,
            )

    def _require_live(self, record: BlockRecord) -> None:
        record.require_live()
        self._require_open()


def _woken(turn: SimpleQueue[None], seconds: float) -> bool:
    try:
        turn.get(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX))
    except Empty:
        return False
    return True
