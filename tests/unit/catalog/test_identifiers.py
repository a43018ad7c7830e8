import threading
from datetime import UTC, datetime, timedelta

import pytest

from tensorforge.catalog.identifiers import TimeSortedIds, time_of
from tensorforge.errors import InvalidInputError

AT = datetime(2026, 11, 16, 1, 2, 3, 456_000, tzinfo=UTC)


def test_ids_sort_by_time_across_makers():
    moments = [AT + timedelta(milliseconds=k) for k in range(50)]
    assert (made := [TimeSortedIds().next(moment) for moment in moments]) == sorted(made)


def test_ids_of_one_maker_sort_within_a_millisecond():
    ids = TimeSortedIds()
    made = [ids.next(AT) for _ in range(1000)]
    assert made == sorted(set(made))


def test_a_clock_that_goes_back_does_not_disturb_the_order():
    ids = TimeSortedIds()
    assert ids.next(AT) < ids.next(AT - timedelta(hours=1))


def test_an_id_tells_when_it_was_made():
    assert time_of(TimeSortedIds().next(AT)) == AT


@pytest.mark.parametrize("text", ["", "abc", "u" * 26, "z" * 26, "0" * 27, "../../etc/passwd"])
def test_other_texts_are_no_ids(text):
    with pytest.raises(InvalidInputError, match="not an id"):
        time_of(text)


@pytest.mark.parametrize("year", [1960, 9999])
def test_a_time_outside_of_the_range_is_refused_or_fits(year):
    moment = datetime(year, 1, 1, tzinfo=UTC)
    if year < 1970:
        with pytest.raises(InvalidInputError, match="outside"):
            TimeSortedIds().next(moment)
    else:
        assert time_of(TimeSortedIds().next(moment)) == moment


def test_threads_get_different_ids():
    ids, made = TimeSortedIds(), []
    threads = [
        threading.Thread(target=lambda: made.extend(ids.next(AT) for _ in range(500)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 2000
