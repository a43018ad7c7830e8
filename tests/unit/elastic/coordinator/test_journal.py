"""The journal and its lease, on SQLite and on PostgreSQL."""

import subprocess
import sys

import pytest
import sqlalchemy as sa

from tensorforge.elastic import WorkerId
from tensorforge.elastic.coordinator.journal import DIGESTS, ENTRIES, HEADS, LEASES, Journal
from tensorforge.elastic.coordinator.journal_chain import link
from tensorforge.elastic.coordinator.journal_records import (
    Decided,
    RunEnded,
    RunResumed,
    Seat,
    TargetSet,
    WasFormed,
    entry_to_json,
)
from tensorforge.errors import (
    ConflictError,
    IntegrityError,
    StaleGenerationError,
    UnavailableError,
)
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


def written(database, count=5):
    journal = Journal(database)
    journal.open()
    for number in range(1, count + 1):
        journal.append([TargetSet(workers=number, by="me")])
    journal.release()


DAMAGES = {
    "UPDATE coordinator_journal SET entry = '{}' WHERE sequence = 3": "entry 3 is not the one",
    "DELETE FROM coordinator_journal WHERE sequence = 3": "entry 3 is missing: 4 follows 2",
    "DELETE FROM coordinator_journal WHERE sequence > 3": "entries 4 to 5 are missing at the end",
    "DELETE FROM coordinator_journal": "all entries are missing; 5 were written",
    "DELETE FROM coordinator_journal_head": "the head of its chain is missing",
    "DELETE FROM coordinator_journal_digest WHERE sequence = 3": "entry 3 has no digest",
    "UPDATE coordinator_journal_digest SET previous = 'x' WHERE sequence = 3": "entry 3 is not",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_journal_is_an_error_that_names_the_entry(database, damage):
    written(database)
    assert Journal(database).check() == 5
    with database.write() as connection:
        connection.execute(sa.text(damage))
    for use in (Journal(database).check, Journal(database).open):
        with pytest.raises(IntegrityError, match=DAMAGES[damage]):
            use()


def test_a_row_replaced_together_with_its_digest_does_not_fit_its_neighbours(database):
    written(database)
    text = entry_to_json(TargetSet(workers=9, by="somebody"))
    with database.write() as connection:
        before = connection.scalar(sa.select(DIGESTS.c.digest).where(DIGESTS.c.sequence == 2))
        connection.execute(ENTRIES.update().where(ENTRIES.c.sequence == 3).values(entry=text))
        digest = link(before, 3, text)
        connection.execute(DIGESTS.update().where(DIGESTS.c.sequence == 3).values(digest=digest))
    with pytest.raises(IntegrityError, match="entry 4 does not follow entry 3"):
        Journal(database).open()


def test_an_entry_that_an_older_version_wrote_is_accepted_without_a_digest(database):
    written(database)
    with database.write() as connection:
        connection.execute(DIGESTS.delete())
        connection.execute(HEADS.delete())
    if database.path is not None:
        for path in database.path.parent.glob("*-head-*"):
            path.unlink()
    journal = Journal(database)
    assert journal.open().desired_workers == 5
    journal.append([TargetSet(workers=6, by="me")])
    journal.release()
    assert Journal(database).check() == 6
    assert Journal(database).open().desired_workers == 6


def test_an_append_that_failed_can_be_repeated(database, monkeypatch):
    journal = Journal(database)
    journal.open()

    def fail(*_):
        raise UnavailableError("cut")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "_store_head", fail)
        with pytest.raises(UnavailableError):
            journal.append([decided(1)])
    assert journal.entries() == []
    journal.append([decided(1)])
    assert [entry.generation for entry in journal.entries()] == [1]
    assert journal.check() == 1


@pytest.mark.parametrize("lost", ["everything", "the newest entries"])
def test_a_database_that_lost_acknowledged_entries_is_refused(tmp_path, lost):
    path = tmp_path / "j.db"
    with Database(path) as database:
        written(database, 2)
        database.backup(tmp_path / "old.db")
        written(database, 3)
    for old in tmp_path.glob("j.db*"):
        if "head" not in old.name:
            old.unlink()
    if lost == "the newest entries":
        (tmp_path / "old.db").rename(path)
    with (
        Database(path) as database,
        pytest.raises(IntegrityError, match="were acknowledged and are missing"),
    ):
        Journal(database).open()


def test_nothing_is_acknowledged_once_the_file_was_deleted(tmp_path):
    with Database(tmp_path / "j.db") as database:
        journal = Journal(database)
        journal.open()
        journal.append([decided(1)])
        (tmp_path / "j.db").unlink()
        with pytest.raises(IntegrityError, match="was deleted or replaced"):
            journal.append([decided(2)])


def test_a_file_that_is_no_database_is_named(tmp_path):
    (tmp_path / "j.db").write_text("no database at all, but long enough to look like one " * 40)
    with (
        Database(tmp_path / "j.db") as database,
        pytest.raises(IntegrityError, match=r"j\.db is damaged: file is not a database"),
    ):
        Journal(database)
