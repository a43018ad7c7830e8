"""The metadata database: SQLite by default, PostgreSQL by URL, one surface for both.

Journal, catalog and registry keep their tables here. They differ in schema, not in how they talk to the
database: `read()` for a consistent view, `write()` for a transaction that is durable once it returns.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.pool import StaticPool

from tensorforge.errors import ClosedError, InvalidInputError, UnavailableError
from tensorforge.storage.prepared import Prepared, Row

IN_MEMORY = "sqlite://"
_BUSY_TIMEOUT_MS = 30_000


class Database:
    """A connection pool to one database. Safe to share between threads; processes open their own.

    `url` is an SQLAlchemy URL (`sqlite:///runs/meta.db`, `postgresql://user@host/db`) or a plain path to
    an SQLite file, whose folder is made if it is missing. `IN_MEMORY` lives as long as this object.
    Errors of the connection are `UnavailableError`; those of a statement are SQLAlchemy's and the caller's
    to translate, since only the caller knows what a violated constraint means.
    """

    def __init__(self, url: str | Path = IN_MEMORY) -> None:
        parsed = _parse(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self.is_in_memory = self.is_sqlite and parsed.database in (None, "", ":memory:")
        self.url = parsed.render_as_string(hide_password=True)
        # One in-memory database is one connection, so its users take turns.
        self._turn = threading.RLock() if self.is_in_memory else contextlib.nullcontext()
        # SQLite's writers wait for each other by sleeping; those of one process can queue instead.
        self._queue = threading.Lock() if self.is_sqlite and not self.is_in_memory else None
        self._closed = False
        self._engine = self._open(parsed)
        driver: Any = self._engine.dialect.loaded_dbapi
        self._unavailable = (
            *(sa.exc.OperationalError, sa.exc.InterfaceError),
            *(driver.OperationalError, driver.InterfaceError),
        )

    def _open(self, url: sa.URL) -> sa.Engine:
        options: dict[str, Any] = {}
        if self.is_in_memory:
            options |= {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
        elif not self.is_sqlite:
            options["pool_pre_ping"] = True
        try:
            engine = sa.create_engine(url, **options)
        except ModuleNotFoundError as error:
            raise InvalidInputError(
                f"{self.url}: the driver {error.name!r} is not installed; "
                "for PostgreSQL install tensorforge[postgres]"
            ) from error
        if self.is_sqlite:
            sa.event.listen(engine, "connect", _prepare_sqlite)
            sa.event.listen(engine, "begin", _begin_sqlite)
        return engine

    def create(self, schema: sa.MetaData) -> None:
        """Make the schema's missing tables and indexes; any number of processes may try at once."""
        with self.write() as connection:
            if not self.is_sqlite:
                key = zlib.crc32(b"tensorforge.schema")
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))
            schema.create_all(connection)

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A connection that sees one consistent state; what it writes is thrown away."""
        with self._connection(immediate=False) as connection:
            transaction = connection.begin()
            try:
                yield connection
            finally:
                transaction.rollback()

    def fetch(self, statement: Prepared, parameters: Mapping[str, Any]) -> list[Row]:
        """The rows of one statement that reads: it sees one consistent state without more ado."""
        with self._translated(), self._turn:
            connection = self._engine.raw_connection()
            try:
                return statement.fetch(connection, self._engine.dialect, parameters)
            finally:
                connection.close()

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction: durable when the block ends, without trace if the block raises.

        SQLite takes its write lock at the start, so that a block which reads and then writes never
        loses a race half-way through.
        """
        with self._queued(), self._connection(immediate=True) as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def _queued(self) -> Iterator[None]:
        if self._queue is None:
            yield
            return
        if not self._queue.acquire(timeout=_BUSY_TIMEOUT_MS / 1000):
            raise UnavailableError(f"the database {self.url} is busy: another thread is writing")
        try:
            yield
        finally:
            self._queue.release()

    @contextlib.contextmanager
    def _connection(self, *, immediate: bool) -> Iterator[sa.Connection]:
        with self._translated(), self._turn, self._engine.connect() as connection:
            connection.info["immediate"] = immediate
            yield connection

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        if self._closed:
            raise ClosedError(f"the database {self.url} was closed")
        try:
            yield
        except self._unavailable as error:
            cause = getattr(error, "orig", error)
            raise UnavailableError(f"the database {self.url} did not answer: {cause}") from error

    def close(self) -> None:
        """Close every connection; closing twice is fine."""
        self._closed = True
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parse(url: str | Path) -> sa.URL:
    text = str(url)
    if isinstance(url, Path) or "://" not in text:
        text = f"sqlite:///{Path(text).expanduser()}"
    try:
        parsed = make_url(text)
    except sa.exc.ArgumentError as error:
        raise InvalidInputError(f"{text!r} is not a database URL: {error}") from error
    backend = parsed.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise InvalidInputError(f"{backend!r} is not supported; use sqlite or postgresql")
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.database and parsed.database != ":memory:":
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    return parsed


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # Python's driver would begin transactions by itself, too late and without the write lock.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    # WAL alone keeps the file consistent; FULL makes each commit survive a power cut too.
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    immediate = connection.info.get("immediate", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")
