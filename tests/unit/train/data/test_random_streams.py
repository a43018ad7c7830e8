import itertools

from tensorforge.train.data.random_streams import stream_seed


def test_a_stream_has_one_seed_for_ever():
    assert stream_seed(0, 0, 0, 0) == 5809880761037817570


def test_places_and_purposes_have_different_streams():
    places = list(itertools.product(range(3), range(3), range(9), range(9)))
    assert len({stream_seed(*place) for place in places}) == len(places)
    assert stream_seed(1, 2, 3) != stream_seed(1, 2, 3, purpose="order")


def test_a_seed_fits_torch():
    assert all(0 <= stream_seed(-5, n) < 2**63 for n in range(100))
