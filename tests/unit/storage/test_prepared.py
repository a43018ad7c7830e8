import threading

import pytest
import sqlalchemy as sa

from tensorforge.errors import ClosedError, InvalidInputError, UnavailableError
from tensorforge.storage import database as database_module
from tensorforge.storage.database import Database
from tensorforge.storage.prepared import Prepared

SCHEMA = sa.MetaData()
THINGS = sa.Table(
    "prepared_things",
    SCHEMA,
    sa.Column("key", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("name", sa.Text, nullable=False),
)
ADD = Prepared(THINGS.insert(), columns=["key", "name"])
BY_NAME = Prepared(
    sa.select(THINGS).where(THINGS.c.name == sa.bindparam("wanted")).order_by(THINGS.c.key)
)
RENAME = Prepared(
    THINGS.update().where(THINGS.c.key == sa.bindparam("which")).values(name=sa.bindparam("new"))
)


@pytest.fixture
def database(database_url):
    with Database(database_url) as opened:
        opened.create(SCHEMA)
        yield opened


def fill(database, *names):
    with database.write() as connection:
        for key, name in enumerate(names):
            ADD.run(connection, {"key": key, "name": name})


def test_rows_come_back_as_dictionaries(database):
    fill(database, "a", "b", "a")
    assert database.fetch(BY_NAME, {"wanted": "a"}) == [
        {"key": 0, "name": "a"},
        {"key": 2, "name": "a"},
    ]
    assert database.fetch(BY_NAME, {"wanted": "c"}) == []


def test_values_are_bound_and_never_become_part_of_the_statement(database):
    nasty = "x'; DROP TABLE prepared_things; -- %s %(name)s ? :a"
    fill(database, nasty, "b")
    assert database.fetch(BY_NAME, {"wanted": nasty}) == [{"key": 0, "name": nasty}]


def test_a_prepared_statement_takes_part_in_the_transaction(database):
    fill(database, "a")
    with pytest.raises(ZeroDivisionError), database.write() as connection:
        RENAME.run(connection, {"which": 0, "new": "b"})
        assert BY_NAME.first(connection, {"wanted": "b"}) == {"key": 0, "name": "b"}
        raise ZeroDivisionError
    assert database.fetch(BY_NAME, {"wanted": "b"}) == []
    assert len(database.fetch(BY_NAME, {"wanted": "a"})) == 1


def test_constants_of_the_statement_need_not_be_given(database):
    fill(database, "a", "b")
    query = sa.select(THINGS.c.name).where(THINGS.c.key == 1, THINGS.c.name == sa.bindparam("n"))
    assert database.fetch(Prepared(query.limit(1)), {"n": "b"}) == [{"name": "b"}]


def test_a_missing_value_is_an_error_and_not_a_null(database):
    with pytest.raises(Exception, match="wanted"):
        database.fetch(BY_NAME, {})


def test_a_statement_whose_text_depends_on_its_values_is_refused(database):
    several = Prepared(sa.select(THINGS).where(THINGS.c.key.in_([1, 2])))
    with pytest.raises(InvalidInputError, match="depends on its values"):
        database.fetch(several, {})


def test_a_closed_database_is_an_error(database):
    database.close()
    with pytest.raises(ClosedError):
        database.fetch(BY_NAME, {"wanted": "a"})


def test_an_error_of_the_driver_names_the_database(tmp_path):
    expected = pytest.raises(UnavailableError, match=r"empty\.db failed: no such table")
    with Database(tmp_path / "empty.db") as database, expected:
        database.fetch(BY_NAME, {"wanted": "a"})


def test_writers_of_one_process_queue_and_a_stuck_one_does_not_hold_others_for_ever(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(database_module, "_BUSY_TIMEOUT_MS", 50)
    with Database(tmp_path / "queue.db") as database:
        database.create(SCHEMA)
        entered, leave = threading.Event(), threading.Event()

        def stuck():
            with database.write():
                entered.set()
                leave.wait(30)

        thread = threading.Thread(target=stuck)
        thread.start()
        assert entered.wait(30)
        with pytest.raises(UnavailableError, match="another thread writes to it"), database.write():
            pass
        leave.set()
        thread.join()
        fill(database, "a")
        assert len(database.fetch(BY_NAME, {"wanted": "a"})) == 1
