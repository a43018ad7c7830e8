"""The blocks of a pool: where each is, its status, and which may be evicted to make room.

A `BlockTable` takes no lock and reads no clock; its owner does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from tensorforge.capacity import check_capacity
from tensorforge.errors import NotFoundError
from tensorforge.memory.pool.blocks import (
    BLOCK_LIFECYCLE,
    AllocationRequest,
    AllocationResult,
    BlockStatus,
    MemoryBlock,
    PoolStats,
    align_up,
    share_outside_largest,
)
from tensorforge.memory.pool.defragmentation import Move, plan_compaction, plan_room
from tensorforge.memory.pool.free_space import FreeSpace

_STALE_ALLOWED = 64
_FREE_PREFIX = "free-"


class _Block:
    """The mutable record of a block in use."""

    __slots__ = (
        "alignment",
        "allocated_at",
        "block_id",
        "last_accessed",
        "offset",
        "priority",
        "serial",
        "size",
        "status",
        "tensor_id",
    )

    def __init__(self, serial: int, request: AllocationRequest, offset: int, size: int) -> None:
        self.serial = serial
        self.block_id = f"block-{serial}"
        self.offset = offset
        self.size = size
        self.status = BlockStatus.PINNED if request.pinned else BlockStatus.ALLOCATED
        self.tensor_id = request.tensor_id
        self.alignment = request.alignment
        self.priority = request.priority
        self.allocated_at = self.last_accessed = 0.0

    def view(self) -> MemoryBlock:
        return MemoryBlock(
            self.block_id,
            self.offset,
            self.size,
            self.status,
            self.tensor_id,
            self.allocated_at,
            self.last_accessed,
            self.priority,
            self.alignment,
        )


class BlockTable:
    """The blocks of `[0, capacity)`, in use or free, without overlap and without gaps.

    Requests of less than `small_block` bytes are placed at the top end of their hole, so that small blocks
    do not lie between large ones.
    """

    def __init__(self, capacity: int, *, small_block: int = 0) -> None:
        self._capacity = capacity
        self._small_block = small_block
        self._space = FreeSpace(capacity)
        self._blocks: dict[str, _Block] = {}
        self._by_tensor: dict[str, dict[str, _Block]] = {}
        self._cached: dict[str, _Block] = {}
        self._oldest: list[tuple[float, int, str]] = []
        self._pinned_bytes = self._cached_bytes = 0
        self._serial = 0

    @property
    def capacity(self) -> int:
        """The number of all bytes, in use or free."""
        return self._capacity

    @property
    def in_use(self) -> int:
        """The number of bytes of all blocks in use."""
        return self._capacity - self._space.free_bytes

    def allocate(self, request: AllocationRequest, now: float) -> AllocationResult:
        """Serve a request by best fit; without room, evict cached blocks if that makes room."""
        problem = request.problem()
        if problem is not None:
            return AllocationResult(False, error=problem)
        size = align_up(request.size, request.alignment)
        from_top = size < self._small_block
        offset = self._space.take(size, request.alignment, from_top=from_top)
        evicted: tuple[str, ...] = ()
        if offset is None:
            evicted = self._cheapest_window(size, request.alignment, request.priority)
            if not evicted:
                return AllocationResult(False, error=self._refusal(size, request))
            for block_id in evicted:
                self.free(block_id)
            offset = self._space.take(size, request.alignment, from_top=from_top)
            assert offset is not None, "an evicted run has room"  # noqa: S101  an invariant
        block = self._enter(request, offset, size, now)
        return AllocationResult(True, block.block_id, offset, size, None, evicted)

    def free(self, block_id: str) -> int:
        """Free a block in use and return its size."""
        block = self._require(block_id)
        self._set_status(block, BlockStatus.FREE)
        del self._blocks[block_id]
        siblings = self._by_tensor[block.tensor_id]
        del siblings[block_id]
        if not siblings:
            del self._by_tensor[block.tensor_id]
        self._space.give(block.offset, block.size)
        return block.size

    def mark_cached(self, block_id: str) -> None:
        """Allow the eviction of the block when room is needed."""
        block = self._require(block_id)
        self._set_status(block, BlockStatus.CACHED)
        self._note_use(block)

    def pin(self, block_id: str) -> None:
        """Forbid that the block is moved or evicted."""
        self._set_status(self._require(block_id), BlockStatus.PINNED)

    def unpin(self, block_id: str) -> None:
        """Allow again that the block is moved."""
        self._set_status(self._require(block_id), BlockStatus.ALLOCATED)

    def touch(self, block_id: str, now: float) -> None:
        """Record an access; a time before the last access changes nothing."""
        block = self._require(block_id)
        if now <= block.last_accessed:
            return
        block.last_accessed = now
        if block.status is BlockStatus.CACHED:
            self._note_use(block)

    def evict(self, needed: int) -> tuple[str, ...]:
        """Free cached blocks, least recently used first, until `needed` bytes are freed; return their ids.

        Blocks last used at the same time are freed in the order of their allocation.
        """
        evicted: list[str] = []
        while needed > 0 and self._cached:
            last_accessed, _, block_id = heappop(self._oldest)
            block = self._cached.get(block_id)
            if block is not None and block.last_accessed == last_accessed:
                needed -= self.free(block_id)
                evicted.append(block_id)
        return tuple(evicted)

    def plan_compaction(self) -> tuple[Move, ...]:
        """The moves that bring all free space together."""
        return plan_compaction((block.view() for block in self._blocks.values()), self._capacity)

    def plan_room(self, size: int, alignment: int) -> tuple[Move, ...]:
        """The moves of the fewest bytes that make room for a request; if there are none, a full compaction."""
        views = [block.view() for block in self._blocks.values()]
        moves = plan_room(views, self._capacity, align_up(size, alignment), alignment)
        return moves or plan_compaction(views, self._capacity)

    def apply(self, moves: tuple[Move, ...]) -> None:
        """Record that the moves were made; the table must not have changed since they were planned."""
        for move in moves:
            self._blocks[move.block_id].offset = move.destination
        used = sorted((block.offset, block.size) for block in self._blocks.values())
        self._space = FreeSpace.around(self._capacity, used)

    def stats(self) -> PoolStats:
        """The current statistics, computed without visiting every block."""
        free, largest = self._space.free_bytes, self._space.largest()
        return PoolStats(
            total_bytes=self._capacity,
            allocated_bytes=self._capacity - free,
            free_bytes=free,
            pinned_bytes=self._pinned_bytes,
            cached_bytes=self._cached_bytes,
            fragmentation_ratio=share_outside_largest(largest, free),
            largest_free_block=largest,
            block_count=len(self._blocks) + len(self._space),
            allocation_count=len(self._blocks),
        )

    def get(self, block_id: str) -> MemoryBlock | None:
        """The block with this id, or `None`; a free block has the id `free-OFFSET`."""
        block = self._blocks.get(block_id)
        if block is not None:
            return block.view()
        start = block_id.removeprefix(_FREE_PREFIX)
        if start != block_id and start.isdecimal() and (size := self._space.hole_at(int(start))):
            return _free_block(int(start), size)
        return None

    def offset_of(self, block_id: str) -> int:
        """The current offset of a block in use."""
        return self._require(block_id).offset

    def blocks(self) -> list[MemoryBlock]:
        """Every block, free ones included, lowest offset first."""
        found = [block.view() for block in self._blocks.values()]
        found += [_free_block(offset, size) for offset, size in self._space.holes()]
        return sorted(found, key=lambda block: block.offset)

    def blocks_for_tensor(self, tensor_id: str) -> list[MemoryBlock]:
        """The blocks in use for a tensor, oldest first."""
        return [block.view() for block in self._by_tensor.get(tensor_id, {}).values()]

    def _enter(self, request: AllocationRequest, offset: int, size: int, now: float) -> _Block:
        self._serial += 1
        block = _Block(self._serial, request, offset, size)
        block.allocated_at = block.last_accessed = now
        self._blocks[block.block_id] = block
        self._by_tensor.setdefault(block.tensor_id, {})[block.block_id] = block
        if request.pinned:
            self._pinned_bytes += size
        return block

    def _require(self, block_id: str) -> _Block:
        block = self._blocks.get(block_id)
        if block is None:
            raise NotFoundError(
                f"no block {block_id!r} is in use: it was freed or evicted, or belongs to another pool"
            )
        return block

    def _set_status(self, block: _Block, status: BlockStatus) -> None:
        if status is not BlockStatus.FREE:  # every block in use may be freed
            BLOCK_LIFECYCLE.require(block.status, status)
        if block.status is BlockStatus.PINNED:
            self._pinned_bytes -= block.size
        elif block.status is BlockStatus.CACHED:
            self._cached_bytes -= block.size
            del self._cached[block.block_id]
        block.status = status
        if status is BlockStatus.PINNED:
            self._pinned_bytes += block.size
        elif status is BlockStatus.CACHED:
            self._cached_bytes += block.size
            self._cached[block.block_id] = block

    def _note_use(self, block: _Block) -> None:
        heappush(self._oldest, (block.last_accessed, block.serial, block.block_id))
        if len(self._oldest) > 2 * len(self._cached) + _STALE_ALLOWED:
            self._oldest = [
                (block.last_accessed, block.serial, block.block_id)
                for block in self._cached.values()
            ]
            heapify(self._oldest)

    def _refusal(self, size: int, request: AllocationRequest) -> str:
        evictable = sum(b.size for b in self._cached.values() if b.priority <= request.priority)
        decision = check_capacity(size, self.in_use - evictable, self._capacity)
        if not decision.admitted:
            return f"out of memory for {request.tensor_id!r}: {decision.reason}"
        return (
            f"{size} bytes aligned to {request.alignment} for {request.tensor_id!r} fit into no hole: "
            f"{self._space.free_bytes} are free and {evictable} evictable, but the largest hole has "
            f"{self._space.largest()}; defragment to join the holes"
        )

    def _cheapest_window(self, size: int, alignment: int, priority: int) -> tuple[str, ...]:
        """The adjacent cached blocks with the fewest bytes whose eviction makes room; empty if none does.

        Among equals: the blocks whose latest use is the longest ago, then the lowest.
        """
        best: list[_Block] = []
        best_rank = (self._capacity, math.inf)
        for run in self._evictable_runs(priority):
            for cost, first, last in _windows(run, self._space, size, alignment):
                if cost > best_rank[0]:
                    continue
                rank = (cost, max(block.last_accessed for block in run[first:last]))
                if not best or rank < best_rank:
                    best, best_rank = run[first:last], rank
        return tuple(block.block_id for block in best)

    def _evictable_runs(self, priority: int) -> Iterator[list[_Block]]:
        """Lists of cached blocks of at most `priority` with only free space between them."""
        evictable = (block for block in self._cached.values() if block.priority <= priority)
        run: list[_Block] = []
        for block in sorted(evictable, key=lambda block: block.offset):
            if run:
                end = run[-1].offset + run[-1].size
                if end + self._space.hole_at(end) != block.offset:
                    yield run
                    run = []
            run.append(block)
        if run:
            yield run


def _windows(
    run: list[_Block], space: FreeSpace, size: int, alignment: int
) -> Iterator[tuple[int, int, int]]:
    """`(bytes, first, last)` for each shortest `run[first:last]` whose eviction makes room."""
    last = end = cost = 0
    for first, block in enumerate(run):
        start = block.offset - space.hole_before(block.offset)
        goal = align_up(start, alignment) + size
        while end < goal and last < len(run):
            cost += run[last].size
            end = run[last].offset + run[last].size
            end += space.hole_at(end)
            last += 1
        if end < goal:
            return
        yield cost, first, last
        cost -= block.size


def _free_block(offset: int, size: int) -> MemoryBlock:
    return MemoryBlock(f"{_FREE_PREFIX}{offset}", offset, size, BlockStatus.FREE)
