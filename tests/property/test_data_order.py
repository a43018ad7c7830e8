"""The shuffled order is a bijection, computed alike in Python and in numpy."""

from hypothesis import given
from hypothesis import strategies as st

from tensorforge.data import ShuffledOrder


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
