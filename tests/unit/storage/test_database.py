import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from tensorforge.errors import ClosedError, InvalidInputError, UnavailableError
from tensorforge.storage.database import IN_MEMORY, Database
from tensorforge.storage.prepared import Prepared

SCHEMA = sa.MetaData()
COUNTER = sa.Table(
    "counter",
    SCHEMA,
    sa.Column("name", sa.String(20), primary_key=True),
    sa.Column("n", sa.BigInteger),
)


def read(database, name):
    with database.read() as connection:
        return connection.scalar(sa.select(COUNTER.c.n).where(COUNTER.c.name == name))


def increment(database, name):
    with database.write() as connection:
        row = connection.execute(
            sa.select(COUNTER.c.n).where(COUNTER.c.name == name).with_for_update()
        ).one()
        connection.execute(COUNTER.update().where(COUNTER.c.name == name).values(n=row.n + 1))


def seed(database):
    database.create(SCHEMA)
    with database.write() as connection:
        connection.execute(COUNTER.insert().values(name="a", n=0))


def increment_many(url):
    with Database(url) as database:
        database.create(SCHEMA)
        for _ in range(50):
            increment(database, "a")


def test_what_a_block_wrote_is_there_for_the_next_opener(database_url):
    with Database(database_url) as database:
        seed(database)
        increment(database, "a")
    with Database(database_url) as database:
        assert read(database, "a") == 1


def test_a_block_that_raises_leaves_no_trace(database_url):
    with Database(database_url) as database:
        seed(database)
        with pytest.raises(RuntimeError), database.write() as connection:
            connection.execute(COUNTER.update().values(n=99))
            raise RuntimeError("crash")
        assert read(database, "a") == 0


def test_a_read_never_writes(database_url):
    with Database(database_url) as database:
        seed(database)
        with database.read() as connection:
            connection.execute(COUNTER.update().values(n=99))
        assert read(database, "a") == 0


def test_processes_that_read_and_write_lose_no_update(database_url):
    with Database(database_url) as database:
        seed(database)
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=increment_many, args=(database_url,)) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0, 0, 0]
        assert read(database, "a") == 150


def test_threads_share_one_in_memory_database():
    with Database(IN_MEMORY) as database:
        seed(database)
        threads = [
            threading.Thread(target=lambda: [increment(database, "a") for _ in range(100)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert read(database, "a") == 400


def test_a_plain_path_is_an_sqlite_file_and_its_folder_is_made(tmp_path):
    with Database(tmp_path / "deep" / "er" / "meta.db") as database:
        seed(database)
    with Database(str(tmp_path / "deep" / "er" / "meta.db")) as database:
        assert read(database, "a") == 0


@pytest.mark.parametrize("url", ["mysql://x/y", "::://"])
def test_an_unknown_database_is_refused(url):
    with pytest.raises(InvalidInputError):
        Database(url)


def test_a_server_that_is_not_there_is_unavailable():
    url = "postgresql://u@127.0.0.1:9/x?connect_timeout=1"
    with (
        Database(url) as database,
        pytest.raises(UnavailableError, match=r"the database .* failed"),
    ):
        database.create(SCHEMA)


def test_a_closed_database_says_so():
    database = Database()
    database.close()
    database.close()
    with pytest.raises(ClosedError), database.read():
        pass


COUNT = Prepared(sa.select(COUNTER.c.n).where(COUNTER.c.name == sa.bindparam("name")))
WRONG = Prepared(sa.select(sa.column("missing")).select_from(sa.table("nowhere")))


def test_any_number_of_threads_read_at_once(database_url):
    barrier = threading.Barrier(12)
    with Database(database_url) as database:
        seed(database)

        def look(_):
            barrier.wait()
            return [database.fetch(COUNT, {"name": "a"}) for _ in range(20)] + [read(database, "a")]

        with ThreadPoolExecutor(12) as pool:
            found = list(pool.map(look, range(12)))
        assert found == [[[{"n": 0}]] * 20 + [0]] * 12


def test_a_statement_that_fails_harms_none_after_it(database_url):
    with Database(database_url) as database:
        seed(database)
        for _ in range(10):
            with pytest.raises(Exception, match="nowhere"):
                database.fetch(WRONG, {})
            assert database.fetch(COUNT, {"name": "a"}) == [{"n": 0}]
        increment(database, "a")
        assert database.fetch(COUNT, {"name": "a"}) == [{"n": 1}]


def test_a_change_that_is_under_way_when_a_file_is_closed_still_counts(tmp_path):
    with Database(tmp_path / "meta.db") as database:
        seed(database)
        with database.write() as connection:
            connection.execute(COUNTER.update().values(n=5))
            database.close()
        with pytest.raises(ClosedError):
            increment(database, "a")
    with Database(tmp_path / "meta.db") as database:
        assert read(database, "a") == 5


def test_a_password_is_never_shown():
    with Database("postgresql://u:secret@127.0.0.1:9/x") as database:
        assert "secret" not in database.url
