"""Percentiles of any values."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.errors import InvalidInputError
from tensorforge.statistics import percentile

numbers = st.floats(-1e9, 1e9)


@given(st.lists(numbers, min_size=1, max_size=50), st.floats(0, 100))
def test_it_agrees_with_numpys_linear_percentile(values, percent):
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_the_ends_are_the_extremes():
    assert percentile([3, 1, 2], 0) == 1
    assert percentile([3, 1, 2], 100) == 3
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([7], 99) == 7


def test_infinities_stay_infinite():
    assert percentile([math.inf, math.inf], 50) == math.inf
    assert percentile([1, math.inf], 0) == 1


@pytest.mark.parametrize("values", [[], [math.nan], [1.0, math.nan, 2.0]])
def test_nothing_measured_is_not_a_number(values):
    assert math.isnan(percentile(values, 50))


@pytest.mark.parametrize("percent", [-1, 100.1, math.nan, math.inf])
def test_a_percent_out_of_range_is_refused(percent):
    with pytest.raises(InvalidInputError, match="between 0 and 100"):
        percentile([1], percent)
