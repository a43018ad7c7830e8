import threading

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorforge.errors import UnavailableError
from tensorforge.storage.database import IN_MEMORY, Database
from tensorforge.storage.prepared import Prepared

SCHEMA = sa.MetaData()
NAMES = sa.Table("names", SCHEMA, sa.Column("name", sa.String(20), primary_key=True))
ALL = Prepared(sa.select(NAMES.c.name).order_by(NAMES.c.name))


class RefusedError(Exception):
    pass


def add(database, *names, fail=False):
    with database.write() as connection:
        for name in names:
            connection.execute(NAMES.insert().values(name=name))
        if fail:
            raise RefusedError


def names(database):
    return [row["name"] for row in database.fetch(ALL, {})]


@pytest.fixture
def database(database_url):
    with Database(database_url) as opened:
        opened.create(SCHEMA)
        yield opened


@pytest.fixture
def sqlite(tmp_path):
    with Database(tmp_path / "meta.db") as opened:
        opened.create(SCHEMA)
        yield opened


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_change_that_raises_is_undone_alone(database, failing):
    with database.batch():
        for number in range(3):
            if number == failing:
                with pytest.raises(RefusedError):
                    add(database, f"{number}", f"{number}-too", fail=True)
            else:
                add(database, f"{number}", f"{number}-too")
    kept = [number for number in range(3) if number != failing]
    assert names(database) == [text for n in kept for text in (f"{n}", f"{n}-too")]


def test_a_batch_reads_what_it_wrote(database):
    with database.batch():
        assert names(database) == []
        add(database, "a")
        assert names(database) == ["a"]
        with database.read() as connection:
            assert connection.scalar(sa.select(sa.func.count()).select_from(NAMES)) == 1


def test_nobody_else_sees_a_batch_before_it_ends(sqlite):
    with Database(sqlite.url) as other:
        with sqlite.batch():
            add(sqlite, "a")
            add(sqlite, "b")
            assert names(other) == []
        assert names(other) == ["a", "b"]


def test_a_batch_that_raises_leaves_no_trace(sqlite):
    with pytest.raises(RefusedError), sqlite.batch():
        add(sqlite, "a")
        add(sqlite, "b")
        raise RefusedError
    assert names(sqlite) == []
    add(sqlite, "c")
    assert names(sqlite) == ["c"]


def test_a_batch_within_a_batch_is_part_of_it(sqlite):
    with pytest.raises(RefusedError), sqlite.batch():
        with sqlite.batch():
            add(sqlite, "a")
        raise RefusedError
    assert names(sqlite) == []


def test_other_threads_write_before_and_after_a_batch_but_not_within(sqlite):
    order = []

    def other():
        add(sqlite, "other")
        order.append("other")

    thread = threading.Thread(target=other)
    with sqlite.batch():
        add(sqlite, "a")
        thread.start()
        add(sqlite, "b")
        order.append("batch")
    thread.join()
    assert order == ["batch", "other"]
    assert names(sqlite) == ["a", "b", "other"]


def test_a_batch_takes_the_lock_with_its_first_change(sqlite):
    with sqlite.batch():
        assert names(sqlite) == []
        with pytest.raises(RefusedError):
            add(sqlite, "refused", fail=True)
        thread = threading.Thread(target=add, args=(sqlite, "other"))
        thread.start()
        thread.join()
        add(sqlite, "a")
    assert names(sqlite) == ["a", "other"]


def lose_the_transaction(database):
    """What a full disk does: SQLite rolls back by itself, and the statement fails."""
    with database.write() as connection:
        connection.connection.driver_connection.execute("ROLLBACK")
        raise RefusedError


def test_a_batch_whose_transaction_was_lost_tells_everybody(sqlite):
    with pytest.raises(UnavailableError, match="rolled back"), sqlite.batch():
        add(sqlite, "a")
        with pytest.raises(RefusedError):
            lose_the_transaction(sqlite)
        with pytest.raises(UnavailableError, match="rolled back"):
            add(sqlite, "b")
    assert names(sqlite) == []
    add(sqlite, "c")
    assert names(sqlite) == ["c"]


def test_after_a_commit_that_was_refused_the_next_batch_begins_anew(sqlite):
    nobody = "CREATE TABLE facts (of TEXT REFERENCES names DEFERRABLE INITIALLY DEFERRED)"
    with sqlite.write() as connection:
        connection.exec_driver_sql(nobody)
    with pytest.raises(sa.exc.IntegrityError), sqlite.batch(), sqlite.write() as connection:
        connection.exec_driver_sql("INSERT INTO facts VALUES ('nobody')")
    with sqlite.batch():
        add(sqlite, "a")
    assert names(sqlite) == ["a"]


def test_in_memory_each_change_stands_alone():
    with Database(IN_MEMORY) as database:
        database.create(SCHEMA)
        with pytest.raises(RefusedError), database.batch():
            add(database, "a")
            raise RefusedError
        assert names(database) == ["a"]


CHANGES = st.lists(
    st.tuples(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3), st.booleans()),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(batches=st.lists(CHANGES, max_size=3))
def test_batches_leave_what_their_changes_would_leave_one_by_one(tmp_path_factory, batches):
    expected: set[str] = set()
    with Database(tmp_path_factory.mktemp("batches") / "meta.db") as database:
        database.create(SCHEMA)
        for changes in batches:
            with database.batch():
                for added, fail in changes:
                    clashes = len(set(added)) < len(added) or not expected.isdisjoint(added)
                    if fail or clashes:
                        with pytest.raises((RefusedError, sa.exc.IntegrityError)):
                            add(database, *added, fail=fail)
                    else:
                        add(database, *added)
                        expected |= set(added)
                    assert names(database) == sorted(expected)
            assert names(database) == sorted(expected)
