import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.errors import InvalidInputError
from tensorforge.memory import (
    BlockStatus,
    GpuDevice,
    MemoryBlock,
    PoolStats,
    align_up,
    best_fit_block,
    estimate_oom_seconds,
    eviction_candidates,
    fragmentation_ratio,
    is_power_of_two,
    memory_pressure,
    optimal_pool_size,
    should_defragment,
)

FREE, USED, CACHED = BlockStatus.FREE, BlockStatus.ALLOCATED, BlockStatus.CACHED


def blocks(*rows):
    """Blocks from (id, size, status) one after the other, with optional last access."""
    found, offset = [], 0
    for name, size, status, *accessed in rows:
        last = accessed[0] if accessed else 0.0
        found.append(MemoryBlock(name, offset, size, status, last_accessed=last))
        offset += size
    return found


def stats(fragmentation, largest):
    return PoolStats(100, 50, 50, 0, 0, fragmentation, largest, 3, 2)


@pytest.mark.parametrize(
    ("size", "alignment", "expected"),
    [(0, 1, 0), (0, 512, 0), (1, 1, 1), (1, 512, 512), (512, 512, 512), (513, 512, 1024)],
)
def test_align_up_at_its_corners(size, alignment, expected):
    assert align_up(size, alignment) == expected


@given(st.integers(0, 2**70), st.integers(0, 40))
def test_align_up_is_the_smallest_multiple_that_is_large_enough(size, exponent):
    alignment = 1 << exponent
    aligned = align_up(size, alignment)
    assert aligned % alignment == 0
    assert size <= aligned < size + alignment


@pytest.mark.parametrize("alignment", [0, 3, -4, 6, True, 2.0])
def test_an_alignment_that_is_no_power_of_two_is_refused(alignment):
    with pytest.raises(InvalidInputError, match="power of two"):
        align_up(8, alignment)


def test_a_negative_size_cannot_be_aligned():
    with pytest.raises(InvalidInputError, match="negative"):
        align_up(-1, 8)


@given(st.integers(0, 100))
def test_every_power_of_two_is_one(exponent):
    assert is_power_of_two(1 << exponent)
    assert is_power_of_two((1 << exponent) + 1) == (exponent == 0)


@pytest.mark.parametrize("n", [0, -1, -8, 12, True, 4.0, None])
def test_everything_else_is_not(n):
    assert not is_power_of_two(n)


def test_fragmentation_is_the_share_outside_the_largest_free_block():
    assert fragmentation_ratio([]) == 0.0
    assert fragmentation_ratio(blocks(("a", 10, USED))) == 0.0
    assert fragmentation_ratio(blocks(("a", 10, FREE))) == 0.0
    four = blocks(("a", 10, FREE), ("b", 5, USED), ("c", 30, FREE), ("d", 1, CACHED))
    assert fragmentation_ratio(four) == 0.25
    many = [row for n in range(1000) for row in ((f"f{n}", 1, FREE), (f"u{n}", 1, USED))]
    assert fragmentation_ratio(blocks(*many)) == pytest.approx(0.999)


def test_the_best_fit_is_the_smallest_block_that_is_large_enough():
    found = blocks(
        ("a", 64, FREE), ("x", 1, USED), ("b", 16, FREE), ("y", 1, CACHED), ("c", 32, FREE)
    )
    assert best_fit_block(found, 16, 1) == "b"
    assert best_fit_block(found, 17, 1) == "c"
    assert best_fit_block(found, 33, 1) == "a"
    assert best_fit_block(found, 65, 1) is None
    assert best_fit_block([], 1, 1) is None


def test_among_equal_blocks_the_lowest_is_the_best_fit():
    found = blocks(("a", 8, FREE), ("x", 8, USED), ("b", 8, FREE))
    assert best_fit_block(reversed(found), 8, 1) == "a"


def test_a_block_that_is_large_enough_only_unaligned_does_not_fit():
    found = blocks(("x", 8, USED), ("a", 16, FREE), ("y", 8, USED), ("b", 64, FREE))
    assert best_fit_block(found, 16, 1) == "a"
    assert best_fit_block(found, 16, 16) == "b"


def test_only_cached_blocks_may_be_evicted_the_least_recently_used_first():
    found = blocks(
        ("new", 1, CACHED, 9.0),
        ("pinned", 1, BlockStatus.PINNED, 0.0),
        ("old", 1, CACHED, 1.0),
        ("used", 1, USED, 0.0),
        ("old too", 1, CACHED, 1.0),
    )
    assert eviction_candidates(found) == ["old", "old too", "new"]


def test_pressure_is_clamped_between_nothing_and_full():
    assert memory_pressure(0, 10) == 0.0
    assert memory_pressure(5, 10) == 0.5
    assert memory_pressure(20, 10) == 1.0
    assert memory_pressure(0, 0) == 1.0


@pytest.mark.parametrize(
    ("fragmentation", "largest", "expected"),
    [(0.6, 10, True), (0.5, 10, False), (0.6, 32, False), (0.1, 100, False)],
)
def test_defragmentation_needs_both_pieces_and_small_ones(fragmentation, largest, expected):
    assert should_defragment(stats(fragmentation, largest), 0.5, 32) is expected


def test_time_to_exhaustion_is_what_is_free_over_the_rate():
    assert estimate_oom_seconds(1000, 100.0) == 10.0
    assert estimate_oom_seconds(0, 100.0) == 0.0


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_without_growth_memory_lasts_for_ever(rate):
    assert estimate_oom_seconds(1000, rate) == math.inf


def test_negative_free_memory_is_a_mistake():
    with pytest.raises(InvalidInputError, match="free_bytes"):
        estimate_oom_seconds(-1, 1.0)


def test_the_pool_size_has_headroom_in_whole_pages():
    assert optimal_pool_size(1000, 1.2, 512) == 1536
    assert optimal_pool_size(1024, 1.0, 512) == 1024
    assert optimal_pool_size(0, 1.5, 512) == 0
    assert optimal_pool_size(10, 1.0, 3) == 12


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((-1, 1.0, 1), "peak_usage"),
        ((1, 0.9, 1), "headroom_factor"),
        ((1, math.nan, 1), "headroom_factor"),
        ((1, math.inf, 1), "headroom_factor"),
        ((1, 1.0, 0), "page_size"),
    ],
)
def test_a_pool_size_from_nonsense_is_refused(arguments, named):
    with pytest.raises(InvalidInputError, match=named):
        optimal_pool_size(*arguments)


@pytest.mark.parametrize("total", [0, -1, 1.5, True])
def test_a_device_has_memory(total):
    with pytest.raises(InvalidInputError, match="total_memory"):
        GpuDevice("gpu", total)
