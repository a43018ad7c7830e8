"""Interval sets agree with plain sets; the order is a bijection whose two forms agree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.data import IntervalSet, Ledger, ShuffledOrder, partition
from tensorforge.data.plan.intervals import union
from tensorforge.errors import EncodingError, InvalidInputError

ranges = st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda r: (r[0], r[0] + r[1]))
range_lists = st.lists(ranges, max_size=8)


def members(items):
    return {number for start, stop in items for number in range(start, stop)}


def is_canonical(found):
    numbers = [number for pair in found for number in pair]
    return numbers == sorted(set(numbers))


@given(range_lists, range_lists)
def test_interval_sets_agree_with_sets(left, right):
    a, b = IntervalSet.of(left), IntervalSet.of(right)
    x, y = members(left), members(right)
    for found, expected in ((a | b, x | y), (a & b, x & y), (a - b, x - y), (union([a, b]), x | y)):
        assert is_canonical(found)
        assert members(found) == expected
        assert found.size == len(expected)
    assert a.isdisjoint(b) == x.isdisjoint(y)
    assert a.issuperset(b) == x.issuperset(y)
    assert [n for n in range(75) if n in a] == sorted(x)
    assert bool(a) == bool(x)


@given(range_lists, st.integers(0, 80))
def test_a_split_takes_the_smallest(items, count):
    whole = IntervalSet.of(items)
    head, rest = whole.split(count)
    assert head == whole.first(count)
    assert members(head) == set(sorted(members(items))[:count])
    assert head | rest == whole
    assert head.isdisjoint(rest)


@given(range_lists, st.integers(0, 80))
def test_the_next_gap_is_the_first_run_of_strangers(items, position):
    taken = members(items)
    start, stop = IntervalSet.of(items).next_gap(position)
    assert start == next(n for n in range(position, 200) if n not in taken)
    assert stop == next((n for n in range(start, 200) if n in taken), None)


@given(range_lists)
def test_an_interval_set_survives_packing(items):
    whole = IntervalSet.of(items)
    assert IntervalSet.unpack(whole.pack()) == whole


@given(st.binary(max_size=12))
def test_arbitrary_bytes_are_an_interval_set_or_an_error(data):
    try:
        found = IntervalSet.unpack(data)
    except EncodingError:
        return
    assert is_canonical(found)


@given(st.binary(max_size=20))
def test_arbitrary_bytes_are_a_proven_ledger_or_an_error(data):
    try:
        Ledger.unpack(b"\x01" + data).prove()
    except EncodingError:
        return


@pytest.mark.parametrize("wrong", [((3, 3),), ((3, 2),), ((0, 2), (2, 3)), ((4, 5), (1, 2))])
def test_the_constructor_demands_canonical_form(wrong):
    with pytest.raises(InvalidInputError):
        IntervalSet(wrong)


@given(
    size=st.integers(0, 300),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 5),
    block=st.integers(1, 40),
    window=st.integers(1, 6),
)
def test_the_order_is_a_bijection_whichever_way_it_is_asked(size, seed, epoch, block, window):
    order = ShuffledOrder(size, seed, epoch, block, window)
    samples = [order[position] for position in range(size)]
    assert sorted(samples) == list(range(size))
    assert order.take(0, size).tolist() == samples
    assert [order.position_of(sample) for sample in samples] == list(range(size))


@given(size=st.integers(1, 10**12), start=st.integers(0, 10**12), block=st.integers(1, 10**5))
def test_large_orders_can_be_entered_anywhere(size, start, block):
    order = ShuffledOrder(size, 1, block=block)
    start %= size
    stop = min(size, start + 40)
    taken = order.take(start, stop).tolist()
    assert len(set(taken)) == stop - start
    assert all(0 <= sample < size for sample in taken)
    assert taken[0] == order[start]
    assert order.position_of(taken[-1]) == stop - 1


@given(st.integers(0, 200), st.integers(1, 20), st.integers(1, 9))
def test_the_steps_of_an_epoch_take_every_position_once(size, shards, batch):
    ledger, seen = Ledger(size, shards), []
    for taken in ledger.steps(batch):
        assert all(part.size <= batch for part in taken)
        ledger = ledger.commit(ledger.committed_step + 1, taken)
        ledger.prove()
        assert Ledger.unpack(ledger.pack()) == ledger
        seen += [n for part in taken for n in range(part.start_index, part.end_index)]
    assert sorted(seen) == list(range(size))
    assert ledger.is_complete
    largest = max(shard.size for shard in partition(size, shards))
    assert ledger.committed_step + 1 == -(-largest // batch)
