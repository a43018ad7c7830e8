import logging
import math
import random
import threading

import pytest
from tests.unit.memory.making import take

from tensorforge.errors import InvalidInputError, NotFoundError, TransitionError
from tensorforge.memory import AllocationRequest, BlockStatus, GpuDevice, MemoryPool


def layout(pool):
    return [(block.offset, block.size, block.status.value) for block in pool.blocks()]


def test_a_new_pool_is_one_free_block(pool):
    assert layout(pool) == [(0, 1000, "free")]
    stats = pool.stats()
    assert (stats.free_bytes, stats.largest_free_block, stats.fragmentation_ratio) == (
        1000,
        1000,
        0.0,
    )
    assert (stats.block_count, stats.allocation_count) == (1, 0)


def test_an_allocation_splits_the_free_block(pool):
    result = pool.allocate(AllocationRequest("w", 100, alignment=64), now=3.0)
    assert (result.success, result.offset, result.actual_size) == (True, 0, 128)
    block = pool.get_block(result.block_id)
    assert (block.tensor_id, block.allocated_at, block.last_accessed) == ("w", 3.0, 3.0)
    assert layout(pool) == [(0, 128, "allocated"), (128, 872, "free")]


def test_a_whole_pool_can_be_one_block(pool):
    take(pool, 1000)
    assert layout(pool) == [(0, 1000, "allocated")]
    assert pool.stats().largest_free_block == 0
    assert not pool.allocate(AllocationRequest("t", 1), 0).success


def test_freed_neighbours_merge_whatever_the_order(pool):
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        keys = [take(pool, 100) for _ in range(3)]
        for index in order:
            pool.free(keys[index])
        assert layout(pool) == [(0, 1000, "free")]


def test_a_padding_hole_before_an_aligned_block_stays_free(pool):
    take(pool, 10)
    assert pool.get_block(take(pool, 64, alignment=64)).offset == 64
    assert layout(pool)[1] == (10, 54, "free")
    assert pool.get_block(take(pool, 54)).offset == 10


@pytest.mark.parametrize(
    ("size", "alignment", "complaint"),
    [
        (0, 1, "size"),
        (-5, 1, "size"),
        (True, 1, "size"),
        (10, 0, "power of two"),
        (10, 3, "power of two"),
    ],
)
def test_a_senseless_request_gets_its_reason_not_an_exception(pool, size, alignment, complaint):
    result = pool.allocate(AllocationRequest("t", size, alignment), 0)
    assert not result.success
    assert complaint in result.error
    assert layout(pool) == [(0, 1000, "free")]


def test_a_refusal_says_what_is_free(pool):
    take(pool, 900)
    result = pool.allocate(AllocationRequest("big", 200), 0)
    assert result.error == "out of memory for 'big': 200 requested, but only 100 of 1000 are free"


def test_a_refusal_for_fragmentation_says_that_defragmenting_helps(pool):
    keys = [take(pool, 100) for _ in range(10)]
    for key in keys[::2]:
        pool.free(key)
    result = pool.allocate(AllocationRequest("big", 200), 0)
    assert "the largest hole has 100; defragment" in result.error
    assert pool.defragment() == 5
    assert pool.stats().fragmentation_ratio == 0.0
    assert pool.allocate(AllocationRequest("big", 500), 0).success


def test_unknown_and_freed_blocks_are_named(pool):
    key = take(pool, 10)
    pool.free(key)
    for method in (pool.free, pool.pin, pool.unpin, pool.mark_cached):
        with pytest.raises(NotFoundError, match=key):
            method(key)
    with pytest.raises(NotFoundError, match="ghost"):
        pool.touch("ghost", 1.0)
    assert pool.get_block(key) is None
    assert pool.get_block("free-7") is None
    assert pool.get_block("free-x") is None
    assert pool.get_block("free-0").status is BlockStatus.FREE


@pytest.mark.parametrize(
    "path",
    [
        ["unpin"],
        ["pin", "pin"],
        ["pin", "mark_cached"],
        ["mark_cached", "mark_cached"],
        ["mark_cached", "unpin"],
    ],
)
def test_illegal_moves_are_refused_and_change_nothing(pool, path):
    key = take(pool, 10)
    for step in path[:-1]:
        getattr(pool, step)(key)
    before = pool.blocks(), pool.stats()
    with pytest.raises(TransitionError, match="a block cannot go from"):
        getattr(pool, path[-1])(key)
    assert (pool.blocks(), pool.stats()) == before


def test_a_pinned_block_may_be_freed_by_its_owner(pool):
    pool.free(take(pool, 10, pinned=True))
    assert pool.stats().pinned_bytes == 0


def test_blocks_of_a_tensor_are_listed_oldest_first(pool):
    first, second = take(pool, 10), take(pool, 10)
    assert [block.block_id for block in pool.blocks_for_tensor("t")] == [first, second]
    pool.free(first)
    assert [block.block_id for block in pool.blocks_for_tensor("t")] == [second]
    assert pool.blocks_for_tensor("other") == []


def cached(pool, *rows):
    keys = []
    for size, now, priority in rows:
        keys.append(take(pool, size, now=now, priority=priority))
        pool.mark_cached(keys[-1])
    return keys


def test_eviction_takes_the_least_recently_used_first(pool):
    a, b, c = cached(pool, (100, 3, 0), (100, 1, 0), (100, 2, 0))
    pool.touch(b, 9)
    assert pool.evict(150) == 200
    assert [pool.get_block(key) is None for key in (a, b, c)] == [True, False, True]
    assert pool.evict(0) == 0
    assert pool.evict(10**9) == 100


def test_a_touch_from_the_past_changes_nothing(pool):
    a, b = cached(pool, (10, 5, 0), (10, 6, 0))
    pool.touch(a, 1)
    assert pool.get_block(a).last_accessed == 5
    pool.evict(1)
    assert pool.get_block(a) is None
    assert pool.get_block(b) is not None


def test_pinned_and_allocated_blocks_are_never_evicted(pool):
    take(pool, 500, pinned=True)
    take(pool, 500)
    assert pool.evict(1000) == 0
    assert not pool.allocate(AllocationRequest("t", 1), 0).success


def test_a_cached_block_comes_back_by_pinning(pool):
    (key,) = cached(pool, (100, 0, 0))
    pool.pin(key)
    assert pool.evict(1) == 0
    pool.unpin(key)
    assert pool.get_block(key).status is BlockStatus.ALLOCATED
    assert pool.evict(1) == 0


def test_an_allocation_evicts_the_cheapest_neighbours_and_says_so(pool):
    a, b, c, d = cached(pool, (400, 0, 0), (150, 0, 0), (150, 0, 0), (300, 0, 0))
    result = pool.allocate(AllocationRequest("t", 300), 1)
    assert result.evicted == (b, c) or result.evicted == (d,)
    assert pool.stats().cached_bytes == 700
    assert pool.get_block(a) is not None


def test_among_equally_cheap_windows_the_one_unused_for_longest_goes(pool):
    recent, _, old, _, newest = cached(
        pool, (200, 8, 0), (200, 9, 5), (200, 2, 0), (200, 9, 5), (200, 9, 0)
    )
    result = pool.allocate(AllocationRequest("t", 200), 10)
    assert result.evicted == (old,)
    assert pool.allocate(AllocationRequest("t", 200), 10).evicted == (recent,)
    assert pool.allocate(AllocationRequest("t", 200), 10).evicted == (newest,)


def test_free_space_beside_a_cached_block_makes_its_eviction_cheaper(pool):
    big, small = cached(pool, (500, 0, 0), (200, 9, 0))
    assert pool.allocate(AllocationRequest("t", 450), 10).evicted == (small,)
    assert pool.get_block(big) is not None


def test_nothing_is_evicted_if_that_would_not_make_room(pool):
    keys = [take(pool, 100) for _ in range(10)]
    for key in keys[::2]:
        pool.mark_cached(key)
    result = pool.allocate(AllocationRequest("t", 200), 0)
    assert (result.success, result.evicted) == (False, ())
    assert "500 evictable" in result.error
    assert pool.stats().cached_bytes == 500


def test_a_request_evicts_only_what_is_not_more_important(pool):
    low, high = cached(pool, (500, 5, 1), (500, 0, 3))
    assert not pool.allocate(AllocationRequest("t", 500, priority=0), 6).success
    assert pool.allocate(AllocationRequest("t", 500, priority=1), 6).evicted == (low,)
    assert pool.allocate(AllocationRequest("t", 500, priority=3), 6).evicted == (high,)


def test_defragmentation_fills_gaps_around_pinned_blocks(pool):
    a = take(pool, 100)
    wall = take(pool, 50, pinned=True)
    b = take(pool, 80)
    c = take(pool, 300)
    pool.free(a)
    assert pool.defragment() == 2
    assert pool.get_block(wall).offset == 100
    assert pool.get_block(b).offset == 0
    assert pool.get_block(c).offset == 150
    assert pool.defragment() == 0


def test_defragmentation_keeps_alignment(pool):
    filler = take(pool, 10)
    key = take(pool, 128, alignment=128)
    pool.free(filler)
    pool.defragment()
    assert pool.get_block(key).offset == 0
    odd = take(pool, 7)
    key = take(pool, 64, alignment=64)
    pool.free(odd)
    pool.defragment()
    assert pool.get_block(key).offset % 64 == 0


def test_small_requests_can_be_kept_apart_at_the_top():
    pool = MemoryPool(GpuDevice("gpu", 1000), small_block=64)
    assert pool.get_block(take(pool, 100)).offset == 0
    assert pool.get_block(take(pool, 10)).offset == 990
    assert pool.get_block(take(pool, 16, alignment=16)).offset == 960


def test_the_high_water_mark_is_reported_once_per_rise(pool):
    seen = []
    pool.on_high_water(0.8, lambda stats: seen.append(stats.allocated_bytes))
    key = take(pool, 799)
    assert seen == []
    other = take(pool, 1)
    take(pool, 1)
    assert seen == [800]
    pool.free(key)
    pool.free_later(other)
    take(pool, 800)
    assert seen == [800, 801]


def test_a_high_water_callback_may_use_the_pool_and_may_fail(pool, caplog):
    def relieve(stats):
        assert pool.evict(1) == 400
        raise RuntimeError("too late")

    pool.on_high_water(1.0, relieve)
    cached(pool, (400, 0, 0))
    with caplog.at_level(logging.ERROR):
        take(pool, 600)
    assert pool.stats().allocated_bytes == 600
    assert "too late" in caplog.text


@pytest.mark.parametrize("mark", [0, -1, 1.1, math.nan])
def test_a_mark_is_a_share(pool, mark):
    with pytest.raises(InvalidInputError, match="mark"):
        pool.on_high_water(mark, print)


def test_the_time_to_exhaustion_follows_the_rate_of_the_last_minute(pool):
    assert pool.oom_seconds(now=0.0) == math.inf
    for second in range(1, 7):
        take(pool, 60, now=second * 10.0)
    assert pool.oom_seconds(now=60.0) == pytest.approx(640 / 6)
    assert pool.oom_seconds(now=1000.0) == math.inf
    assert pool.pressure() == 0.36


def churn(pool, seed, operations):
    rng = random.Random(seed)
    mine = []
    for step in range(operations):
        choice = rng.random()
        if choice < 0.5 or not mine:
            request = AllocationRequest(f"t{seed}", rng.randint(1, 2000), 1 << rng.randint(0, 6))
            result = pool.allocate(request, now=step)
            if result.success:
                mine.append(result.block_id)
        elif choice < 0.9:
            key = mine.pop(rng.randrange(len(mine)))
            (pool.free if choice < 0.8 else pool.free_later)(key)
        elif choice < 0.95:
            pool.touch(rng.choice(mine), step)
        elif choice < 0.999:
            key = rng.choice(mine)
            pool.pin(key)
            pool.unpin(key)
        else:
            pool.defragment()
    for key in mine:
        pool.free(key)


def run_threads(threads, operations):
    pool = MemoryPool(GpuDevice("gpu", 1 << 20))
    workers = [
        threading.Thread(target=churn, args=(pool, seed, operations)) for seed in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert layout(pool) == [(0, 1 << 20, "free")]
    assert pool._table._by_tensor == {}
    assert pool._table._blocks == {}
    return pool


def test_eight_threads_leave_nothing_behind():
    run_threads(threads=8, operations=2000)


@pytest.mark.soak
def test_eight_threads_with_a_hundred_thousand_operations_each_leave_nothing_behind():
    run_threads(threads=8, operations=100_000)
