"""Interval sets agree with plain sets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.data import IntervalSet
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


@pytest.mark.parametrize("wrong", [((3, 3),), ((3, 2),), ((0, 2), (2, 3)), ((4, 5), (1, 2))])
def test_the_constructor_demands_canonical_form(wrong):
    with pytest.raises(InvalidInputError):
        IntervalSet(wrong)
