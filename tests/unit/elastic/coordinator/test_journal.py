"""The journal and its lease, on SQLite and on PostgreSQL."""

import subprocess
import sys

import pytest

from tensorforge.elastic import WorkerId
from tensorforge.elastic.coordinator.journal import LEASES, Journal
from tensorforge.elastic.coordinator.journal_records import (
    Decided,
    RunEnded,
    RunResumed,
    Seat,
    TargetSet,
    WasFormed,
)
from tensorforge.errors import ConflictError, EncodingError, StaleGenerationError
from tensorforge.processes import ProcessIdentity
from tensorforge.storage.database import Database
from tensorforge.testing.clock import ManualClock

ELSEWHERE = ProcessIdentity("another-machine", "", "", 1, 0.0)
SEATS = (Seat(WorkerId("a", "h", 1), "i1"), Seat(WorkerId("b", "h", 2), "i2"))


def decided(generation, **fields):
    defaults = {
        "generation": generation,
        "old_generation": generation - 1,
        "seats": SEATS,
        "type": "scale_up",
        "reason": "because",
        "urgent": False,
        "paused": False,
    }
    return Decided(**{**defaults, **fields})


@pytest.fixture
def database(database_url):
    with Database(database_url) as opened:
        yield opened


def test_what_was_appended_adds_up_for_the_next_coordinator(database):
    first = Journal(database)
    assert first.open().generation == 0
    first.append([TargetSet(workers=3, by="me"), decided(1)])
    first.append([WasFormed(generation=1, barrier_ms=12.0)])
    first.release()
    state = Journal(database).open()
    assert state.generation == state.formed_generation == 1
    assert state.seats == state.formed_seats == SEATS
    assert state.desired_workers == 3
    assert state.history[-1].barrier_ms == 12.0


def test_runs_do_not_mix(database):
    one, two = Journal(database, "one"), Journal(database, "two")
    one.open()
    two.open()
    one.append([decided(7)])
    assert two.entries() == []
    assert [entry.generation for entry in one.entries()] == [7]


def test_an_ended_run_can_be_resumed_and_keeps_its_generations(database):
    journal = Journal(database)
    journal.open()
    journal.append([decided(4), RunEnded(outcome="aborted", reason="x")])
    journal.append([RunResumed(reason="again")])
    journal.release()
    state = Journal(database).open()
    assert state.ended is None
    assert state.generation == 4
    assert state.seats == ()


def test_a_second_coordinator_is_refused_while_the_first_holds_the_lease(database):
    Journal(database, holder=ELSEWHERE).open()
    with pytest.raises(ConflictError, match="is led by process 1 on another-machine"):
        Journal(database).open()


def test_a_released_lease_is_free_at_once(database):
    first = Journal(database, holder=ELSEWHERE)
    first.open()
    first.release()
    first.release()
    Journal(database).open()


def test_an_old_coordinator_that_wakes_up_can_write_nothing(database):
    old = Journal(database, holder=ELSEWHERE, lease_seconds=-1)
    old.open()
    new = Journal(database)
    new.open()
    new.append([decided(1)])
    with pytest.raises(StaleGenerationError, match="does not lead run 'default' any more"):
        old.append([decided(2)])
    with pytest.raises(StaleGenerationError):
        old.renew()
    old.release()
    new.append([decided(2)])
    assert [entry.generation for entry in new.entries()] == [1, 2]


def test_a_lease_that_is_renewed_does_not_end(tmp_path):
    clock = ManualClock()
    with Database(tmp_path / "j.db") as database:
        first = Journal(database, holder=ELSEWHERE, lease_seconds=10, clock=clock)
        first.open()
        clock.advance(9)
        first.renew()
        clock.advance(9)
        second = Journal(database, lease_seconds=10, clock=clock)
        with pytest.raises(ConflictError, match=r"ends in 1\.0 s"):
            second.open()
        clock.advance(1)
        second.open()


def test_a_dead_process_on_this_machine_need_not_be_waited_for(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    holder = ProcessIdentity.of(process.pid)
    with Database(tmp_path / "j.db") as database:
        Journal(database, holder=holder).open()
        with pytest.raises(ConflictError):
            Journal(database).open()
        process.communicate()
        Journal(database).open()


def test_a_lease_that_an_older_version_wrote_is_waited_for(tmp_path):
    clock = ManualClock(100.0)
    with Database(tmp_path / "j.db") as database:
        Journal(database, holder=ELSEWHERE, lease_seconds=10, clock=clock).open()
        with database.write() as connection:
            connection.execute(LEASES.update().values(holder="host/boot/pid:[1] 1 1700000000.5"))
        second = Journal(database, lease_seconds=10, clock=clock)
        with pytest.raises(ConflictError, match="is led by host/boot"):
            second.open()
        clock.advance(10)
        second.open()


def test_a_damaged_journal_is_an_error_not_a_guess(tmp_path):
    import sqlalchemy as sa

    with Database(tmp_path / "j.db") as database:
        journal = Journal(database)
        journal.open()
        journal.append([decided(1)])
        with database.write() as connection:
            connection.execute(sa.text("UPDATE coordinator_journal SET entry = '{}'"))
        with pytest.raises(EncodingError, match="not an entry of the journal"):
            journal.open()
