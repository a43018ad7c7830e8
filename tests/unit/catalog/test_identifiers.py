import threading
from datetime import UTC, datetime, timedelta

import pytest

from tensorforge.catalog.identifiers import TimeSortedIds
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


@pytest.mark.parametrize("year", [1970, 2026, 9999])
def test_ids_of_different_makers_sort_by_the_millisecond(year):
    moment = datetime(year, 1, 1, tzinfo=UTC)
    later = moment + timedelta(milliseconds=1)
    assert TimeSortedIds().next(moment) < TimeSortedIds().next(later)


def test_a_time_before_1970_is_refused():
    with pytest.raises(InvalidInputError, match="before 1970"):
        TimeSortedIds().next(datetime(1960, 1, 1, tzinfo=UTC))


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
