from hypothesis import given
from hypothesis import strategies as st

from tensorforge.train.group.healing import rounds


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 20))
def test_rounds_are_complete_ordered_and_bounded(sizes, limit):
    seen = [0] * len(sizes)
    for ranges in rounds(sizes, limit):
        assert 0 < sum(stop - start for _, start, stop in ranges) <= limit
        for index, start, stop in ranges:
            assert start == seen[index]
            seen[index] = stop
    assert seen == sizes
