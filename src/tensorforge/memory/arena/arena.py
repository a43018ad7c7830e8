"""An arena: one torch storage, lent out in blocks.

A tensor is made over a slice of the storage, not as a slice of a tensor. So it has a storage of its own
size, and `torch.save` and `deepcopy` write the block and not the arena. A block with a live view (a tensor,
one derived from it, a numpy array or a memoryview) counts as pinned: it is not moved, evicted or reused
before its last view is gone.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
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
from tensorforge.memory.finalizer_lock import FinalizerLock
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
from tensorforge.validation import whole_number


class TensorArena:
    """`capacity` bytes of real memory on `device`, lent as tensors. Safe to share between threads.

    The address and the size of every block are multiples of `alignment`. Requests below `small_block` bytes
    are placed at the top end, away from the large ones. `huge_pages` asks the system for pages of 2 MiB,
    which suit large blocks that are reused often.
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
        whole_number("capacity", capacity, least=1)
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
        self._lock = FinalizerLock()
        self._waiting: deque[SimpleQueue[None]] = deque()
        self._clock = clock
        self._closed = False

    def allocate(self, nbytes: int, *, tensor_id: str = "", priority: int = 0) -> ArenaBlock:
        """Allocate a block of `nbytes` without waiting; `CapacityError` if there is no room."""
        with self._lock:
            record = self._try_allocate(nbytes, tensor_id, priority)
            if isinstance(record, str):
                self._refuse(nbytes, record)
        return ArenaBlock(self, record)

    def acquire(
        self, nbytes: int, timeout: float, *, tensor_id: str = "", priority: int = 0
    ) -> ArenaBlock:
        """Allocate a block of `nbytes`, waiting up to `timeout` seconds for room.

        Waiting callers are served in the order of their calls. If enough bytes are free but not
        contiguous, blocks without views are moved. A block larger than the arena is a `CapacityError` at
        once; no room in time is a `DeadlineExceededError`.
        """
        deadline = time.monotonic() + timeout
        turn: SimpleQueue[None] = SimpleQueue()
        with self._lock:
            self._require_possible(nbytes)
            self._waiting.append(turn)
            self._wake()
        try:
            while True:
                expired = not _woken(turn, deadline - time.monotonic())
                with self._lock:
                    record = self._serve(turn, nbytes, tensor_id, priority)
                if record is not None:
                    return ArenaBlock(self, record)
                if expired:
                    raise DeadlineExceededError(
                        f"no room for {nbytes} bytes within {timeout:g} s "
                        f"in an arena of {self.capacity} bytes"
                    )
        finally:
            with self._lock:
                self._waiting.remove(turn)
                self._wake()

    def lend(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, tensor_id: str = ""
    ) -> torch.Tensor:
        """A tensor with undefined contents, whose block is freed when its last view is gone.

        No room is a `CapacityError`. A tensor without elements takes no block.
        """
        nbytes = bytes_of(shape, dtype)
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        with self._lock:
            record = self._try_allocate(nbytes, tensor_id, 0)
            if isinstance(record, str):
                self._refuse(nbytes, record)
            tensor = self._make_view(record, dtype, shape)
            record.end_reason = "lent"
        return tensor

    def free(self, handle: ArenaBlock) -> None:
        """Free a block: at once, or when its last view is gone."""
        if handle._arena is not self:  # noqa: SLF001  a handle and its arena are one unit
            raise InvalidInputError(f"{handle.block_id} belongs to another arena")
        with self._lock:
            record = handle._record  # noqa: SLF001
            self._require_live(record)
            self._drop(record)

    def evict(self, needed: int) -> int:
        """Free cached blocks, least recently used first, until `needed` bytes are freed; return the bytes."""
        with self._lock:
            self._require_open()
            before = self._table.in_use
            self._forget(self._table.evict(needed), "evicted")
            self._wake()
            return before - self._table.in_use

    def defragment(self) -> int:
        """Move the blocks without a live view together, with their bytes, and return how many moved.

        Other threads that use the arena wait meanwhile.
        """
        with self._lock:
            self._require_open()
            moved = self._execute(self._table.plan_compaction())
            self._wake()
            return moved

    def stats(self) -> PoolStats:
        """The current statistics; blocks with live views count as pinned."""
        with self._lock:
            self._require_open()
            return self._table.stats()

    def blocks(self) -> list[MemoryBlock]:
        """Every block, free ones included, lowest offset first."""
        with self._lock:
            self._require_open()
            return self._table.blocks()

    def close(self) -> None:
        """Refuse further requests, and release the memory when its last view is gone."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._forget(tuple(self._records), "of a closed arena")
            self._memory.release()
            for turn in self._waiting:
                turn.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _try_allocate(self, nbytes: int, tensor_id: str, priority: int) -> BlockRecord | str:
        """Allocate a block; return its record, or the reason for the failure."""
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
        """Allocate for the caller that waits longest, moving blocks if that may help; otherwise `None`."""
        self._require_open()
        if self._waiting[0] is not turn:
            return None
        record = self._try_allocate(nbytes, tensor_id, priority)
        if isinstance(record, str) and self._room_in_pieces(nbytes):
            self._execute(self._table.plan_room(nbytes, self.alignment))
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
                raise InvalidInputError(
                    f"{record.nbytes} bytes are not a multiple of the size of {dtype}"
                )
            shape = (record.nbytes // dtype.itemsize,)
        wanted = bytes_of(shape, dtype)
        if wanted > record.nbytes:
            raise InvalidInputError(
                f"{tuple(shape)} of {dtype} needs {wanted} bytes, but {record.block_id} has {record.nbytes}"
            )
        with self._lock:
            self._require_live(record)
            return self._make_view(record, dtype, shape)

    def _make_view(
        self, record: BlockRecord, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        part = record.view() if record.view is not None else None
        if part is None:
            part = self._slice(record)
            record.view = weakref.ref(part, self._when_view_ends(record))
            record.views += 1
            if record.views == 1 and record.requested_status is not BlockStatus.PINNED:
                self._table.pin(record.block_id)
        self._table.touch(record.block_id, self._clock())
        return self._memory.tensor(part, dtype, shape)

    def _when_view_ends(self, record: BlockRecord) -> Callable[[object], None]:
        """The callback for the end of a view's storage; it only queues, as it may run in any finalizer."""
        lock, method = self._lock, weakref.WeakMethod(self._view_ended)

        def ended(_: object) -> None:
            view_ended = method()
            if view_ended is not None:  # otherwise the arena is gone too
                lock.later(functools.partial(view_ended, record))

        return ended

    def _slice(self, record: BlockRecord) -> torch.UntypedStorage:
        return self._memory.slice(self._table.offset_of(record.block_id), record.nbytes)

    def _view_ended(self, record: BlockRecord) -> None:
        record.views -= 1
        if record.views or record.block_id not in self._records:
            return
        if record.end_reason is not None:
            self._release(record)
            return
        if record.requested_status is not BlockStatus.PINNED:
            self._table.unpin(record.block_id)
        if record.requested_status is BlockStatus.CACHED:
            self._table.mark_cached(record.block_id)
        self._wake()

    def _change(self, record: BlockRecord, status: BlockStatus) -> None:
        """Set the status that the owner requests; it takes effect when the block has no live view."""
        apply = {
            BlockStatus.PINNED: self._table.pin,
            BlockStatus.ALLOCATED: self._table.unpin,
            BlockStatus.CACHED: self._table.mark_cached,
        }[status]
        with self._lock:
            self._require_live(record)
            record.requested_status = BLOCK_LIFECYCLE.require(record.requested_status, status)
            if not record.views:
                apply(record.block_id)
                self._wake()

    def _drop_later(self, record: BlockRecord) -> None:
        """Free the block of a handle that was garbage-collected; this may run inside a finalizer."""
        self._lock.later(lambda: self._drop(record) if record.end_reason is None else None)

    def _drop(self, record: BlockRecord) -> None:
        record.end_reason = "freed"
        if not record.views:
            self._release(record)

    def _release(self, record: BlockRecord) -> None:
        self._table.free(record.block_id)
        del self._records[record.block_id]
        self._wake()

    def _forget(self, block_ids: Sequence[str], reason: str) -> None:
        for block_id in block_ids:
            self._records.pop(block_id).end_reason = reason

    def _wake(self) -> None:
        if self._waiting:
            self._waiting[0].put(None)

    def _execute(self, moves: tuple[Move, ...]) -> int:
        for move in moves:
            self._memory.move(move)
        self._table.apply(moves)
        return len(moves)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the arena is closed")

    def _require_possible(self, nbytes: int) -> None:
        self._require_open()
        whole_number("nbytes", nbytes, least=1)
        if nbytes > self.capacity:
            raise CapacityError(
                f"{nbytes} bytes can never fit into an arena of {self.capacity} bytes",
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
