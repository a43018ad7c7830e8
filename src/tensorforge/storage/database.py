"""The metadata database: SQLite by default, PostgreSQL by URL, with one interface for both.

Journal, catalog and registry have their tables here. Each brings its schema, and uses `read()` for a consistent
view and `write()` for a transaction that is durable when its block ends.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.pool import StaticPool

from tensorforge.errors import ClosedError, IntegrityError, InvalidInputError, UnavailableError
from tensorforge.storage.prepared import Prepared, Row
from tensorforge.storage.write_batch import WriteBatch

IN_MEMORY = "sqlite://"
_BUSY_TIMEOUT_MS = 30_000
_KEPT_READERS = 4
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PRIMARY_CODE = 0xFF
"""SQLite's extended error codes have the plain code in their lowest byte."""


class Database:
    """A connection pool to one database. Safe to share between threads; each process opens its own.

    `url` is an SQLAlchemy URL (`sqlite:///runs/meta.db`, `postgresql://user@host/db`) or a path to an
    SQLite file, whose folder is created if missing; a new file can be read by its owner only. An `IN_MEMORY`
    database lives as long as this object. A failure of the connection is an `UnavailableError`, a file that is
    damaged or no database an `IntegrityError`. Errors of a statement are SQLAlchemy's; the caller
    translates them, because only the caller knows what a violated constraint means.
    """

    def __init__(self, url: str | Path = IN_MEMORY) -> None:
        parsed = _parse(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self.is_in_memory = self.is_sqlite and parsed.database in (None, "", ":memory:")
        self.url = parsed.render_as_string(hide_password=True)
        self.path = Path(str(parsed.database)) if self.is_sqlite and not self.is_in_memory else None
        self._file = None if self.path is None else _file_identity(self.path)
        # An in-memory database is one connection, which only one thread uses at a time.
        self._turn = threading.RLock() if self.is_in_memory else contextlib.nullcontext()
        # SQLite's writers poll for the write lock; writers of one process wait on this lock instead.
        self._queue = threading.Lock() if self.is_sqlite and not self.is_in_memory else None
        # Connections to an SQLite file that are kept between uses: returning one to the pool and taking
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
            # The kept connections, and SQLAlchemy's default of five for the rest.
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
        """Create the schema's missing tables, columns and indexes; several processes may do so at once.

        A column can be added to an existing table only if it is nullable or has a default in the database.
        """
        with self.write() as connection:
            if not self.is_sqlite:
                key = zlib.crc32(b"tensorforge.schema")
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))
            schema.create_all(connection)
            _add_missing_columns(connection, schema)

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A connection that sees one consistent state; its writes are rolled back.

        Within a `batch` it also sees the changes of the batch, and must not write.
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
        """The rows of one reading statement, without the cost of a transaction."""
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
        """A transaction: durable when the block ends, rolled back if the block raises.

        SQLite takes its write lock at the start, so that a block that reads and then writes cannot conflict
        with another writer. Within a `batch` the changes are durable when the batch ends.
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

        If a `write` block raises, only its changes are undone. If the batch raises, all its changes are
        undone. With PostgreSQL, where writers do not wait for each other, and in memory, where nothing is
        durable, each `write` block keeps its own transaction.
        """
        if self._queue is None or self._batch is not None:
            yield
            return
        batch = self._thread.batch = WriteBatch(self._writing)
        try:
            with self._translated():
                yield
                batch.commit()
        finally:
            self._thread.batch = None
            batch.close()

    @property
    def _batch(self) -> WriteBatch | None:
        return getattr(self._thread, "batch", None)

    def _shared_connection(self) -> sa.Connection | None:
        batch = self._batch
        return None if batch is None else batch.connection

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        """Wait for this thread's turn; then a connection whose transaction takes the write lock."""
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
            raise UnavailableError(f"the database {self.url} is busy: another thread writes to it")
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
            if _is_damage(cause):
                raise self._damaged(cause) from error
            raise UnavailableError(f"the database {self.url} failed: {cause}") from error
        except (sqlite3.DatabaseError, sa.exc.DatabaseError) as error:
            cause = getattr(error, "orig", error)
            if _is_damage(cause):
                raise self._damaged(cause) from error
            raise

    def _damaged(self, cause: object) -> IntegrityError:
        return IntegrityError(
            f"the database {self.url} is damaged: {cause}. Restore a backup of it"
        )

    @property
    def was_replaced(self) -> bool:
        """Whether the file was deleted or replaced since this object was made: writes would be lost."""
        return self.path is not None and _file_identity(self.path) != self._file

    def backup(self, target: Path) -> None:
        """Copy a consistent state of an SQLite database to a new file, also while others write to it.

        `target` must not exist. For PostgreSQL, use its own tools: `InvalidInputError`.
        """
        if self.path is None:
            raise InvalidInputError(f"{self.url} is no SQLite file; back it up with its own tools")
        _make_private(target)
        with self._translated(), self.read() as connection:
            driver: Any = connection.connection.driver_connection
            copy = sqlite3.connect(target)
            try:
                driver.backup(copy)
            finally:
                copy.close()

    def close(self) -> None:
        """Close every connection; closing again changes nothing."""
        self._closed = True
        self._close_kept()
        self._engine.dispose()

    def _close_kept(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            self._readers.append(writer)
        while self._readers:
            connection = self._readers.pop()
            # Do not return it to the pool, which may be closed already.
            connection.detach()
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _add_missing_columns(connection: sa.Connection, schema: sa.MetaData) -> None:
    """Add the columns that a database of an earlier release lacks."""
    found = sa.inspect(connection)
    for table in schema.sorted_tables:
        present = {column["name"] for column in found.get_columns(table.name)}
        for column in table.columns:
            if column.name not in present:
                definition = sa.schema.CreateColumn(column).compile(dialect=connection.dialect)
                connection.execute(sa.text(f"ALTER TABLE {table.name} ADD COLUMN {definition}"))


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
        path = Path(parsed.database)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with contextlib.suppress(FileExistsError):
                _make_private(path)
    return parsed


def _make_private(path: Path) -> None:
    """Make an empty file for its owner only. SQLite gives its other files the same permissions."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        raise
    except OSError as error:
        raise UnavailableError(f"the database {path} cannot be made: {error.strerror}") from error


def _file_identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino)


def _is_damage(error: object) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(code, int) and code & _PRIMARY_CODE in _DAMAGED


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # Python's driver would begin transactions itself, later and without the write lock.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    # WAL keeps the file consistent; FULL also makes each commit survive a power failure.
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    driver: Any = connection.connection.driver_connection
    driver.execute("BEGIN IMMEDIATE" if connection.info.get("immediate", False) else "BEGIN")
