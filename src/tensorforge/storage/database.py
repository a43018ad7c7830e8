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
from tensorforge.storage.write_batch import Batch

IN_MEMORY = "sqlite://"
_BUSY_TIMEOUT_MS = 30_000
_KEPT_READERS = 4


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
        # Connections to an SQLite file that are kept between uses: giving one back to the pool and taking
        # it again costs more than a point read.
        self._readers: list[Any] = []
        self._writer: sa.Connection | None = None
        self._thread = threading.local()
        self._closed = False
        self._engine = self._open(parsed)
        self.dialect = self._engine.dialect.name
        driver: Any = self._engine.dialect.loaded_dbapi
        self._unavailable = (
            *(sa.exc.OperationalError, sa.exc.InterfaceError),
            *(driver.OperationalError, driver.InterfaceError),
        )

    def _open(self, url: sa.URL) -> sa.Engine:
        options: dict[str, Any] = {}
        if self.is_in_memory:
            options |= {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
        elif self.is_sqlite:
            # The kept connections, and five for everybody else as usual.
            options |= {"pool_size": _KEPT_READERS + 1 + 5, "max_overflow": -1}
        else:
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
        """A connection that sees one consistent state; what it writes is thrown away.

        Within a `batch` that has changed something it sees that too, and must not write at all.
        """
        shared = self._shared_connection()
        if shared is not None:
            yield shared
            return
        with self._connection(immediate=False) as connection:
            transaction = connection.begin()
            try:
                yield connection
            finally:
                transaction.rollback()

    def fetch(self, statement: Prepared, parameters: Mapping[str, Any]) -> list[Row]:
        """The rows of one statement that reads: it sees one consistent state without more ado."""
        shared = self._shared_connection()
        if shared is not None:
            return statement.all(shared, parameters)
        with self._translated(), self._turn:
            connection = self._take_reader()
            try:
                rows = statement.fetch(connection, self._engine.dialect, parameters)
            except BaseException:
                connection.close()
                raise
            self._keep_reader(connection)
            return rows

    def _take_reader(self) -> Any:
        try:
            return self._readers.pop()
        except IndexError:
            return self._engine.raw_connection()

    def _keep_reader(self, connection: Any) -> None:
        if self._queue is None or len(self._readers) >= _KEPT_READERS:
            connection.close()
            return
        self._readers.append(connection)
        if self._closed:
            self._close_kept()

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction: durable when the block ends, without trace if the block raises.

        SQLite takes its write lock at the start, so that a block which reads and then writes never
        loses a race half-way through. Within a `batch` it is durable when that ends.
        """
        batch = self._batch
        if batch is None:
            with self._writing() as connection, connection.begin():
                yield connection
        else:
            with self._translated(), batch.change() as connection:
                yield connection

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Let the `write` blocks of this thread share one transaction, which is durable when the block ends.

        A `write` block that raises is undone alone. If the batch itself raises, nothing of it was written,
        whatever its blocks seemed to have done. Where writers do not wait for each other anyway
        (PostgreSQL) or nothing is durable (in memory), each block keeps its own transaction.
        """
        if self._queue is None or self._batch is not None:
            yield
            return
        batch = self._thread.batch = Batch(self._writing)
        try:
            with self._translated():
                yield
                batch.commit()
        finally:
            self._thread.batch = None
            batch.close()

    @property
    def _batch(self) -> Batch | None:
        return getattr(self._thread, "batch", None)

    def _shared_connection(self) -> sa.Connection | None:
        batch = self._batch
        return None if batch is None else batch.connection

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        """A connection whose transaction will hold the write lock, once this thread's turn has come."""
        with self._queued(), self._translated():
            if self._queue is None:
                with self._connection(immediate=True) as connection:
                    yield connection
                return
            connection = self._writer or self._engine.connect()
            self._writer = None
            connection.info["immediate"] = True
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
            self._writer = connection
            if self._closed:
                self._close_kept()

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
        self._close_kept()
        self._engine.dispose()

    def _close_kept(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            self._readers.append(writer)
        while self._readers:
            connection = self._readers.pop()
            # Not back into the pool, which may be gone already.
            connection.detach()
            connection.close()

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
    driver: Any = connection.connection.driver_connection
    driver.execute("BEGIN IMMEDIATE" if connection.info.get("immediate", False) else "BEGIN")
