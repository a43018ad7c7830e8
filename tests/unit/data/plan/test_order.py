import collections
import itertools
import math

import numpy as np
import pytest

from tensorforge.data import ShardLocalOrder, ShuffledOrder
from tensorforge.errors import InvalidInputError

GOLDEN = [
    [3, 7, 1, 9, 8, 2, 0, 5, 6, 4],
    [349167807028, 20899819050, 474111913962],
    [633, 395, 397, 635, 638],
]


def chi_squared_per_degree(counts, expected):
    counts = np.asarray(counts, dtype=float)
    return float(((counts - expected) ** 2 / expected).sum() / (counts.size - 1))


def test_the_same_arguments_give_the_same_order_for_ever():
    # Golden values: a change here would reorder the epochs of every run that is under way.
    assert ShuffledOrder(10, 7, 0).take(0, 10).tolist() == GOLDEN[0]
    assert ShuffledOrder(10**12, 7, 3).take(10**11, 10**11 + 3).tolist() == GOLDEN[1]
    assert ShuffledOrder(1000, 7, 3, 8, 4).take(500, 505).tolist() == GOLDEN[2]


def test_seed_epoch_stream_block_and_window_each_change_the_order():
    def first(**changes):
        return tuple(ShuffledOrder(**{"size": 1000, "block": 4, **changes}).take(0, 50))

    orders = [
        first(),
        first(seed=1),
        first(epoch=1),
        first(stream=1),
        first(block=5),
        first(window=3),
    ]
    assert len(set(orders)) == len(orders)


def test_a_trillion_samples_cost_nothing():
    order = ShuffledOrder(10**12, seed=1)
    taken = order.take(10**12 - 1000, 10**12)
    assert len(set(taken.tolist())) == 1000
    assert taken[-1] == order[10**12 - 1]
    assert order.position_of(int(taken[0])) == 10**12 - 1000


def test_a_run_of_positions_reads_from_few_blocks():
    order = ShuffledOrder(100_003, seed=2, block=64, window=8)
    run = 64 * 8
    for start in (0, 40 * run, 99 * run):
        blocks = {int(sample) // 64 for sample in order.take(start, start + run)}
        assert len(blocks) <= 8 + 1  # the incomplete block may shift the others by a part


def test_every_order_of_a_few_samples_is_equally_likely():
    for size in (2, 3, 4, 5):
        draws = 60 * math.factorial(size)
        seen = collections.Counter(
            tuple(ShuffledOrder(size, seed)[i] for i in range(size)) for seed in range(draws)
        )
        counts = [seen[order] for order in itertools.permutations(range(size))]
        degrees = len(counts) - 1
        assert chi_squared_per_degree(counts, 60) < 1 + 5 * math.sqrt(2 / degrees)


@pytest.mark.parametrize(("block", "window"), [(1, 16), (16, 16)])
def test_positions_and_samples_are_independent(block, window):
    size, cells = 4096, 16
    table = np.zeros((cells, cells))
    for seed in range(60):
        samples = ShuffledOrder(size, seed, block=block, window=window).take(0, size)
        np.add.at(table, (np.arange(size) * cells // size, samples * cells // size), 1)
    if block == 1:
        assert chi_squared_per_degree(table, 60 * size / cells**2) < 1 + 5 * math.sqrt(2 / 255)
    else:
        # Blocks travel as wholes, so cells are counted in blocks, not in samples.
        assert chi_squared_per_degree(table / block, 60 * size / cells**2 / block) < 1.5


def test_neighbours_in_the_order_are_unrelated():
    samples = ShuffledOrder(10**9, 5).take(10**6, 10**6 + 200_000).astype(float)
    correlation = float(np.corrcoef(samples[:-1], samples[1:])[0, 1])
    assert abs(correlation) < 5 / math.sqrt(200_000)


def test_a_shard_local_order_keeps_every_sample_in_its_shard():
    order = ShardLocalOrder(103, 10, seed=1, epoch=2)
    for shard in order.shards:
        samples = order.take(shard.start_index, shard.end_index)
        assert sorted(samples) == list(range(shard.start_index, shard.end_index))
    assert order.take(5, 70).tolist() == [order[i] for i in range(5, 70)]
    later = ShardLocalOrder(103, 10, seed=1, epoch=3)
    assert later.take(0, 103).tolist() != order.take(0, 103).tolist()


def test_a_shard_local_order_may_have_empty_shards():
    order = ShardLocalOrder(3, 7)
    assert [order[i] for i in range(3)] == [0, 1, 2] == order.take(0, 3).tolist()
    assert order.take(3, 3).tolist() == []


@pytest.mark.parametrize("order", [ShuffledOrder(5), ShardLocalOrder(5, 2)])
def test_a_position_outside_is_an_error(order):
    for position in (-1, 5):
        with pytest.raises(IndexError, match=f"position {position} is not in"):
            order[position]
    for start, stop in ((-1, 2), (3, 2), (2, 6)):
        with pytest.raises(InvalidInputError, match="not within"):
            order.take(start, stop)
    assert len(order) == 5


@pytest.mark.parametrize(
    "changes", [{"size": -1}, {"size": 1 << 63}, {"epoch": -1}, {"block": 0}, {"seed": 1.5}]
)
def test_wrong_arguments_are_named(changes):
    with pytest.raises(InvalidInputError, match=next(iter(changes))):
        ShuffledOrder(**{"size": 5, **changes})
