"""The pool against a naive model: a list of blocks that is scanned in full for every answer."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from tensorforge.errors import NotFoundError, TransitionError
from tensorforge.memory import (
    AllocationRequest,
    BlockStatus,
    GpuDevice,
    MemoryPool,
    align_up,
    best_fit_block,
    eviction_candidates,
    fragmentation_ratio,
)
from tensorforge.memory.pool.free_space import FreeSpace

FREE, ALLOCATED, PINNED, CACHED = (
    BlockStatus.FREE,
    BlockStatus.ALLOCATED,
    BlockStatus.PINNED,
    BlockStatus.CACHED,
)
CAPACITY = 1 << 10
alignments = st.sampled_from([1, 1, 4, 16, 64, 256])
sizes = st.integers(1, 64) | st.integers(1, CAPACITY // 3)


@dataclass(frozen=True)
class Known:
    offset: int
    size: int
    alignment: int
    status: BlockStatus
    last_accessed: float
    priority: int
    age: int


class Model:
    """What the pool should hold, kept the slow and obvious way."""

    def __init__(self, small_block=0):
        self.blocks = {}
        self.small_block = small_block
        self.age = 0

    def gaps(self, without=()):
        used = sorted(
            (b.offset, b.offset + b.size) for k, b in self.blocks.items() if k not in without
        )
        cursor, found = 0, []
        for start, end in [*used, (CAPACITY, CAPACITY)]:
            if start > cursor:
                found.append((cursor, start))
            cursor = end
        return found

    def place(self, size, alignment, without=()):
        fits = [
            (end - start, start, end)
            for start, end in self.gaps(without)
            if align_up(start, alignment) + size <= end
        ]
        if not fits:
            return None
        _, start, end = min(fits)
        if size < self.small_block:
            return (end - size) & -alignment
        return align_up(start, alignment)

    def cheapest_eviction(self, size, alignment, priority):
        cached = sorted(
            (b.offset, key)
            for key, b in self.blocks.items()
            if b.status is CACHED and b.priority <= priority
        )
        keys = [key for _, key in cached]
        options = []
        for first in range(len(keys)):
            for last in range(first + 1, len(keys) + 1):
                chosen = keys[first:last]
                if not self.contiguous(chosen) or self.place(size, alignment, chosen) is None:
                    continue
                blocks = [self.blocks[key] for key in chosen]
                cost = sum(b.size for b in blocks)
                options.append(
                    (cost, max(b.last_accessed for b in blocks), blocks[0].offset, chosen)
                )
                break
        return min(options)[3] if options else None

    def contiguous(self, keys):
        start = self.blocks[keys[0]].offset
        end = self.blocks[keys[-1]].offset + self.blocks[keys[-1]].size
        return all(
            key in keys or b.offset + b.size <= start or b.offset >= end
            for key, b in self.blocks.items()
        )

    def lru(self):
        cached = [
            (b.last_accessed, b.age, key) for key, b in self.blocks.items() if b.status is CACHED
        ]
        return [key for _, _, key in sorted(cached)]


class PoolMachine(RuleBasedStateMachine):
    live = Bundle("live")

    @initialize(small_block=st.sampled_from([0, 0, 32]))
    def start(self, small_block):
        self.pool = MemoryPool(GpuDevice("test", CAPACITY), small_block=small_block)
        self.model = Model(small_block)
        self.now = 0.0
        self.gone = []

    def known(self, key):
        return key in self.model.blocks

    def change(self, key, **changes):
        self.model.blocks[key] = replace(self.model.blocks[key], **changes)

    @rule(
        target=live,
        size=sizes,
        alignment=alignments,
        pinned=st.integers(0, 5).map(lambda n: n == 0),
        priority=st.integers(-1, 1),
    )
    def allocate(self, size, alignment, pinned, priority):
        return self.request(size, alignment, pinned, priority)

    @rule(
        target=live,
        wanted=st.lists(
            st.tuples(st.integers(1, 200), st.integers(-1, 1), st.sampled_from("acccpf")),
            min_size=8,
            max_size=20,
        ),
    )
    def fill_up(self, wanted):
        """Most of the interesting choices are made in a pool that is full of cached blocks."""
        kept = []
        for size, priority, fate in wanted:
            self.now += 1
            key = self.request(size, 1, fate == "p", priority)
            if not isinstance(key, str):
                continue
            kept.append(key)
            if fate == "c":
                self.mark_cached(key)
            elif fate == "f":
                self.free(kept.pop(), queued=False)
        return multiple(*kept)

    def request(self, size, alignment, pinned, priority):
        actual = align_up(size, alignment)
        expected = self.model.place(actual, alignment)
        evicted = ()
        if expected is None:
            evicted = self.model.cheapest_eviction(actual, alignment, priority) or ()
            if evicted:
                expected = self.model.place(actual, alignment, evicted)
        result = self.pool.allocate(
            AllocationRequest(f"t{size % 3}", size, alignment, pinned, priority), self.now
        )
        assert result.success == (expected is not None), result
        assert result.evicted == tuple(evicted)
        if not result.success:
            assert result.error
            return multiple()
        assert result.offset == expected
        assert result.offset % alignment == 0
        assert result.actual_size == actual
        for key in evicted:
            assert self.model.blocks.pop(key).status is CACHED
            self.gone.append(key)
        self.model.age += 1
        status = PINNED if pinned else ALLOCATED
        self.model.blocks[result.block_id] = Known(
            expected, actual, alignment, status, self.now, priority, self.model.age
        )
        return result.block_id

    @rule(key=consumes(live), queued=st.booleans())
    def free(self, key, queued):
        if not self.known(key):
            with pytest.raises(NotFoundError, match=key):
                self.pool.free(key)
            return
        (self.pool.free_later if queued else self.pool.free)(key)
        del self.model.blocks[key]
        self.gone.append(key)

    def move(self, key, method, legal_from, to):
        if not self.known(key):
            with pytest.raises(NotFoundError, match=key):
                method(key)
        elif self.model.blocks[key].status in legal_from:
            method(key)
            self.change(key, status=to)
        else:
            with pytest.raises(TransitionError):
                method(key)

    @rule(key=live)
    def mark_cached(self, key):
        self.move(key, self.pool.mark_cached, {ALLOCATED}, CACHED)

    @rule(key=live)
    def pin(self, key):
        self.move(key, self.pool.pin, {ALLOCATED, CACHED}, PINNED)

    @rule(key=live)
    def unpin(self, key):
        self.move(key, self.pool.unpin, {PINNED}, ALLOCATED)

    @rule(key=live, step=st.integers(-1, 2))
    def touch(self, key, step):
        self.now = max(self.now, self.now + step)
        if self.known(key):
            self.pool.touch(key, self.now + min(step, 0))
            latest = max(self.model.blocks[key].last_accessed, self.now + min(step, 0))
            self.change(key, last_accessed=latest)

    @rule(needed=st.integers(0, 3) | st.integers(0, CAPACITY))
    def evict(self, needed):
        expected, total = [], 0
        for key in self.model.lru():
            if total >= needed:
                break
            total += self.model.blocks[key].size
            expected.append(key)
        assert self.pool.evict(needed) == total
        for key in expected:
            del self.model.blocks[key]
            self.gone.append(key)

    @rule()
    @precondition(lambda self: self.model.blocks)
    def defragment(self):
        before = self.pool.stats()
        moved = self.pool.defragment()
        changed = 0
        for key, known in list(self.model.blocks.items()):
            block = self.pool.get_block(key)
            assert (block.size, block.alignment, block.status) == (
                known.size,
                known.alignment,
                known.status,
            )
            assert block.offset <= known.offset
            assert known.status is not PINNED or block.offset == known.offset
            changed += block.offset != known.offset
            self.change(key, offset=block.offset)
        assert moved == changed
        after = self.pool.stats()
        assert after.free_bytes == before.free_bytes
        if not after.pinned_bytes:
            uneven = sum(b.alignment > 1 for b in self.model.blocks.values())
            assert uneven or after.fragmentation_ratio == 0.0
        assert self.pool.defragment() == 0 or after.pinned_bytes or uneven
        for key in self.model.blocks:
            self.change(key, offset=self.pool.get_block(key).offset)

    @invariant()
    def the_pool_is_what_the_model_says(self):
        if not hasattr(self, "pool"):
            return
        blocks = self.pool.blocks()
        self.check_cover(blocks)
        in_use = {b.block_id: b for b in blocks if b.status is not FREE}
        assert in_use.keys() == self.model.blocks.keys()
        for key, known in self.model.blocks.items():
            block = in_use[key]
            assert (block.offset, block.size, block.status) == (
                known.offset,
                known.size,
                known.status,
            )
            assert block.offset % known.alignment == 0
            assert block.last_accessed == known.last_accessed
            assert self.pool.get_block(key) == block
        self.check_stats(blocks)
        assert set(eviction_candidates(blocks)) == set(self.model.lru())
        for key in self.gone[-3:]:
            assert self.pool.get_block(key) is None

    @staticmethod
    def check_cover(blocks):
        cursor, previous = 0, None
        for block in blocks:
            assert block.offset == cursor
            assert block.size > 0
            assert not (previous is FREE and block.status is FREE), "free neighbours are merged"
            cursor, previous = block.end, block.status
        assert cursor == CAPACITY

    def check_stats(self, blocks):
        stats = self.pool.stats()
        by = {s: sum(b.size for b in blocks if b.status is s) for s in BlockStatus}
        assert stats.total_bytes == CAPACITY == stats.allocated_bytes + stats.free_bytes
        assert stats.free_bytes == by[FREE]
        assert (stats.pinned_bytes, stats.cached_bytes) == (by[PINNED], by[CACHED])
        assert stats.fragmentation_ratio == pytest.approx(fragmentation_ratio(blocks))
        assert stats.largest_free_block == max(
            (b.size for b in blocks if b.status is FREE), default=0
        )
        assert (stats.block_count, stats.allocation_count) == (len(blocks), len(self.model.blocks))


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
TestPoolAgainstAModel = PoolMachine.TestCase


@given(
    st.lists(st.tuples(st.integers(1, 300), alignments, st.integers(0, 10**6)), max_size=120),
    st.booleans(),
)
def test_free_space_takes_the_smallest_hole_and_the_lowest_among_equals(steps, from_top):
    space, taken = FreeSpace(CAPACITY), []
    for size, alignment, pick in steps:
        holes = [(s, o) for o, s in space.holes() if -o % alignment + size <= s]
        offset = space.take(size, alignment, from_top=from_top)
        if not holes:
            assert offset is None
        else:
            hole, start = min(holes)
            assert start <= offset <= start + hole - size
            assert offset % alignment == 0
            taken.append((offset, size))
        if taken and pick % 2:
            space.give(*taken.pop(pick % len(taken)))
        assert space.free_bytes == CAPACITY - sum(size for _, size in taken)
        assert space.largest() == max((size for _, size in space.holes()), default=0)
        again = FreeSpace.around(CAPACITY, sorted(taken))
        assert again.holes() == space.holes()
        assert len(again) == len(space)
    for block in taken:
        space.give(*block)
    assert space.holes() == [(0, CAPACITY)]


@given(st.lists(st.tuples(sizes, alignments), min_size=1, max_size=30), sizes, alignments)
def test_the_function_and_the_pool_choose_the_same_block(requests, size, alignment):
    pool = MemoryPool(GpuDevice("test", CAPACITY))
    for index, (nbytes, align) in enumerate(requests):
        result = pool.allocate(AllocationRequest("t", nbytes, align), now=0)
        if result.success and index % 2:
            pool.free(result.block_id)
    chosen = best_fit_block(pool.blocks(), align_up(size, alignment), alignment)
    hole = pool.get_block(chosen) if chosen else None
    result = pool.allocate(AllocationRequest("t", size, alignment), now=1)
    assert result.success == (hole is not None)
    if hole is not None:
        assert hole.offset <= result.offset < hole.end
