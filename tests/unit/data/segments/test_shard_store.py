import pytest
from tests.unit.data.segments.making import ARRAYS, RECORDS, array, records

from tensorforge.data import IntervalSet, ShardStore
from tensorforge.errors import (
    ClosedError,
    ConflictError,
    EncodingError,
    InvalidInputError,
    NotFoundError,
)


def test_what_is_put_can_be_read_sample_by_sample(store):
    store.put(10, 20, array(10, 20))
    assert store[12].tolist() == [36, 37, 38]
    assert [x.tolist() for x in store.__getitems__([10, 19])] == [[30, 31, 32], [57, 58, 59]]
    assert store.held == IntervalSet(((10, 20),))
    assert len(store) == 1000
    store[12][0] = 7  # a copy of its own, so the store does not change
    assert store[12].tolist() == [36, 37, 38]


def test_records_have_any_length(record_store):
    record_store.put(5, 50, records(5, 50))
    assert [record_store[i] for i in range(5, 50)] == records(5, 50)


def test_a_sample_that_is_not_held_is_said_to_be_missing(store):
    store.put(0, 10, array(0, 10))
    with pytest.raises(NotFoundError, match="sample 10 is not stored"):
        store[10]
    with pytest.raises(IndexError, match="sample 1000"):
        store[1000]
    with pytest.raises(NotFoundError, match="does not contain the samples 10-12"):
        store.open_range(5, 12)


def test_a_store_is_found_again_with_everything_in_it(tmp_path):
    with ShardStore(tmp_path, ARRAYS) as store:
        store.put(3, 9, array(3, 9))
    with ShardStore(tmp_path) as again:
        assert (again.info, again.held) == (ARRAYS, IntervalSet(((3, 9),)))
        again.verify()


def test_another_data_set_is_not_mixed_in(tmp_path):
    ShardStore(tmp_path, ARRAYS).close()
    with pytest.raises(ConflictError, match="contains another data set"):
        ShardStore(tmp_path, RECORDS)
    with pytest.raises(NotFoundError, match="not a shard store"):
        ShardStore(tmp_path / "elsewhere")
    (tmp_path / "schema.json").write_text("{}")
    with pytest.raises(EncodingError, match="does not describe a data set"):
        ShardStore(tmp_path)


def test_a_closed_store_is_not_used(store):
    store.close()
    store.close()
    with pytest.raises(ClosedError):
        store.refresh()


def test_only_segments_of_which_nothing_is_kept_are_released(store):
    for start in (0, 10, 20):
        store.put(start, start + 10, array(start, start + 10))
    assert store.release(IntervalSet(((12, 15),))) == IntervalSet(((0, 10), (20, 30)))
    assert store.held == IntervalSet(((10, 20),))


@pytest.mark.parametrize(
    ("start", "stop", "samples", "message"),
    [
        (0, 10, array(0, 9), r"shape \(9, 3\) was given, expected \(10, 3\)"),
        (990, 1001, array(990, 1001), r"\[990, 1001\) is no range"),
        (5, 5, array(5, 5), r"\[5, 5\) is no range"),
    ],
)
def test_wrong_samples_are_refused(store, start, stop, samples, message):
    with pytest.raises(InvalidInputError, match=message):
        store.put(start, stop, samples)
