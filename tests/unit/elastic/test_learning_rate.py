import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.elastic import AdaptationStrategy, adapt_learning_rate
from tensorforge.errors import InvalidInputError

counts = st.integers(1, 10_000)


@given(counts, counts)
def test_each_strategy_has_its_law(base, workers):
    assert adapt_learning_rate(0.1, base, workers, AdaptationStrategy.NONE) == 0.1
    linear = adapt_learning_rate(0.1, base, workers, AdaptationStrategy.LINEAR)
    root = adapt_learning_rate(0.1, base, workers, AdaptationStrategy.SQUARE_ROOT)
    assert linear == pytest.approx(0.1 * workers / base)
    assert root == pytest.approx(0.1 * math.sqrt(workers / base))


@pytest.mark.parametrize("strategy", AdaptationStrategy)
def test_the_base_number_of_workers_has_exactly_the_base_rate(strategy):
    assert adapt_learning_rate(0.1, 3, 3, strategy) == 0.1


@pytest.mark.parametrize(
    "arguments", [(-0.1, 1, 1), (math.nan, 1, 1), (math.inf, 1, 1), (0.1, 0, 1), (0.1, 1, 0)]
)
def test_impossible_input_is_refused(arguments):
    with pytest.raises(InvalidInputError):
        adapt_learning_rate(*arguments, AdaptationStrategy.LINEAR)
