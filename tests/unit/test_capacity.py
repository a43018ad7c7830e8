"""Whether a request fits, how full a queue is, how fast something grows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.capacity import RollingWindow, check_capacity, queue_pressure
from tensorforge.errors import CapacityError, InvalidInputError

amounts = st.integers(0, 1000)


@given(amounts, amounts, amounts)
def test_a_request_is_admitted_exactly_if_it_fits(requested, in_use, capacity):
    decision = check_capacity(requested, in_use, capacity)
    assert decision.admitted == (requested + in_use <= capacity or requested == 0)


def test_without_a_limit_everything_fits():
    assert check_capacity(10**18, 10**18, None).admitted


def test_a_refusal_says_how_much_is_free():
    decision = check_capacity(10, 95, 100)
    with pytest.raises(CapacityError, match="10 requested, but only 5 of 100 are free") as caught:
        decision.require()
    assert (caught.value.requested, caught.value.available) == (10, 5)
    check_capacity(5, 95, 100).require()


@pytest.mark.parametrize("arguments", [(-1, 0, 0), (0, -1, 0), (0, 0, -1)])
def test_negative_amounts_are_refused(arguments):
    with pytest.raises(InvalidInputError):
        check_capacity(*arguments)


def test_pressure_goes_from_empty_to_full():
    assert queue_pressure(0, 10) == 0.0
    assert queue_pressure(5, 10) == 0.5
    assert queue_pressure(50, 10) == 1.0
    assert queue_pressure(0, 0) == 1.0
    with pytest.raises(InvalidInputError):
        queue_pressure(-1, 10)


def test_a_window_forgets_what_is_older_than_itself():
    window = RollingWindow(10)
    window.add(5, now=0)
    window.add(7, now=4)
    assert window.total(now=4) == 12
    assert window.count(now=4) == 2
    assert window.rate(now=4) == 1.2
    assert window.total(now=10) == 7
    assert window.total(now=14) == 0


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 9)), max_size=40))
def test_a_window_counts_what_a_full_scan_counts(entries):
    entries.sort()
    window = RollingWindow(10)
    for index, (now, amount) in enumerate(entries):
        window.add(amount, now)
        expected = [a for t, a in entries[: index + 1] if now - 10 < t <= now]
        assert window.total(now) == sum(expected)
        assert window.count(now) == len(expected)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_window_needs_a_length(seconds):
    with pytest.raises(InvalidInputError):
        RollingWindow(seconds)
