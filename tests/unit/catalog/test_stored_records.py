from datetime import UTC, datetime, timedelta

import pytest

from tensorforge.catalog.stored_records import prefix_of, run_and_id_of, writer_has_ended
from tensorforge.processes import ProcessIdentity

NOW = datetime(2026, 11, 16, tzinfo=UTC)
A_DAY = timedelta(days=1, seconds=1)


@pytest.mark.parametrize("run", ["run", "a run/1", "..", ".", "été", "50%", "a b~c"])
def test_a_prefix_has_one_part_for_any_run_and_tells_it(run):
    prefix = prefix_of(run, "id")
    assert prefix.count("/") == 1
    assert not prefix.startswith(".")
    assert run_and_id_of(prefix) == (run, "id")


@pytest.mark.parametrize("prefix", ["", "id", "/id", "a/b/id", "a%2gb/id"])
def test_a_prefix_of_another_form_tells_no_run(prefix):
    assert run_and_id_of(prefix) is None


def test_a_running_process_has_not_ended_however_long_it_takes():
    assert not writer_has_ended(ProcessIdentity.current(), NOW - A_DAY, NOW)


def test_a_process_of_this_host_that_does_not_run_has_ended():
    assert writer_has_ended(ProcessIdentity.of(1 << 30), NOW, NOW)


@pytest.mark.parametrize("process", [None, ProcessIdentity("another host", "", "", 1, 0.0)])
def test_a_process_that_cannot_be_seen_has_ended_after_a_day(process):
    assert not writer_has_ended(process, NOW, NOW)
    assert writer_has_ended(process, NOW - A_DAY, NOW)
