"""The journal is cut short without anybody noticing, on SQLite and on PostgreSQL."""

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.elastic import WorkerId
from tensorforge.elastic.coordinator import journal, journal_records
from tensorforge.elastic.coordinator.journal import ENTRIES, Journal
from tensorforge.elastic.coordinator.journal_records import (
    Decided,
    RunEnded,
    RunResumed,
    Seat,
    Snapshot,
    TargetSet,
    WasCommitted,
    WasFormed,
    entry_from_json,
    entry_to_json,
    replay,
)
from tensorforge.errors import StaleGenerationError
from tensorforge.processes import ProcessIdentity
from tensorforge.storage.database import Database

ELSEWHERE = ProcessIdentity("another-machine", "", "", 1, 0.0)


def seats(names):
    return tuple(Seat(WorkerId(name, "h", 1), f"{name}-1", "7") for name in names)


def decided(generation, names="ab", paused=False):
    return Decided(
        generation=generation,
        old_generation=generation - 1,
        seats=seats(names),
        type="scale_up",
        reason=f"reason {generation}",
        urgent=False,
        paused=paused,
    )


def committed(generation, step):
    return WasCommitted(
        generation=generation,
        epoch=0,
        step=step,
        learning_rate=0.1,
        samples=step,
        global_batch_size=8,
    )


@st.composite
def histories(draw):
    """Entries as a machine could have written them, or not: folding must not care."""
    entries = []
    for generation in range(1, draw(st.integers(1, 12))):
        names = draw(st.lists(st.sampled_from("abcd"), unique=True))
        entries.append(decided(generation, names, paused=draw(st.booleans())))
        entries += draw(
            st.lists(
                st.sampled_from(
                    [
                        WasFormed(generation=generation, barrier_ms=1.5, moved={"bytes": 3}),
                        committed(generation, generation * 10),
                        TargetSet(workers=generation, by="me"),
                        RunEnded(outcome="aborted", reason="x"),
                        RunResumed(reason="again"),
                    ]
                ),
                max_size=3,
            )
        )
    return entries


@given(histories(), st.data())
def test_a_snapshot_anywhere_adds_up_to_the_same(entries, data):
    at = data.draw(st.integers(0, len(entries)))
    snapshot = Snapshot(state=replay(entries[:at]))
    written = [entry_from_json(entry_to_json(entry)) for entry in (snapshot, *entries[at:])]
    assert replay(written) == replay(entries)


@pytest.fixture
def database(database_url):
    with Database(database_url) as opened:
        yield opened


def rows(database, run_id="default"):
    with database.read() as connection:
        query = sa.select(sa.func.count()).where(ENTRIES.c.run_id == run_id)
        return connection.scalar(query.select_from(ENTRIES))


def test_compaction_changes_nothing_for_the_next_coordinator(database):
    first = Journal(database)
    first.open()
    first.append([TargetSet(workers=2, by="me"), decided(1), WasFormed(generation=1)])
    first.append([decided(2, "bc"), committed(1, 40)])
    before = replay(first.entries())
    first.compact()
    assert rows(database) == 1
    first.append([WasFormed(generation=2)])
    first.release()
    after = Journal(database).open()
    assert after.generation == after.formed_generation == 2
    assert after.desired_workers == 2
    assert after.committed == before.committed
    assert [record.reason for record in after.history] == ["reason 1", "reason 2"]
    assert after.open_groups == (journal_records.OpenGroup(2, seats("bc")),)


def test_other_runs_keep_their_entries(database):
    one, two = Journal(database, "one"), Journal(database, "two")
    one.open()
    two.open()
    one.append([decided(1), decided(2)])
    two.append([decided(1), decided(2), decided(3)])
    one.compact()
    assert (rows(database, "one"), rows(database, "two")) == (1, 3)


def test_a_coordinator_that_was_replaced_can_not_compact(database):
    old = Journal(database, holder=ELSEWHERE, lease_seconds=-1)
    old.open()
    old.append([decided(1)])
    new = Journal(database)
    new.open()
    new.append([decided(2), decided(3)])
    with pytest.raises(StaleGenerationError):
        old.compact()
    assert [entry.generation for entry in new.entries()] == [1, 2, 3]


def test_it_is_due_by_count_and_by_size(tmp_path, monkeypatch):
    with Database(tmp_path / "j.db") as database:
        written = Journal(database)
        written.open()
        for generation in range(1, journal.COMPACT_AFTER):
            written.append([decided(generation)])
        assert not written.is_compaction_due
        written.append([decided(journal.COMPACT_AFTER)])
        assert written.is_compaction_due
        written.compact()
        assert not written.is_compaction_due
        monkeypatch.setattr(journal, "COMPACT_AFTER_BYTES", 1)
        written.append([decided(1000)])
        assert written.is_compaction_due


def test_a_long_journal_is_cut_short_when_it_is_opened(database, monkeypatch):
    first = Journal(database)
    first.open()
    monkeypatch.setattr(journal, "COMPACT_AFTER", 10)
    first.append([decided(generation) for generation in range(1, 31)])
    first.release()
    second = Journal(database)
    state = second.open()
    assert rows(database) == 1
    second.append([decided(31)])
    second.release()
    third = Journal(database).open()
    assert (state.generation, third.generation) == (30, 31)
    assert len(third.history) == 31


def test_what_people_can_look_back_at_is_the_same_with_and_without_compaction(database):
    plain, cut = Journal(database, "plain"), Journal(database, "cut")
    plain.open()
    cut.open()
    for generation in range(1, journal_records.HISTORY + 50):
        entries = [decided(generation), WasFormed(generation=generation, forming_ms=generation)]
        plain.append(entries)
        cut.append(entries)
        if generation % 40 == 0:
            cut.compact()
    assert rows(database, "cut") < 90
    plain.release()
    cut.release()
    shown = Journal(database, "cut").open().history
    assert shown == Journal(database, "plain").open().history
    assert len(shown) == journal_records.HISTORY
