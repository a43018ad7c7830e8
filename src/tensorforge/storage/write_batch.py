"""Several changes in one transaction of SQLite; each can fail without undoing the others.

Making a small change durable costs more than the change itself. Changes that wait for the write lock at the
same time share that cost: they run one after the other in one transaction, each behind a savepoint, and the
transaction is committed once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa

from tensorforge.errors import UnavailableError


class WriteBatch:
    """The transaction that the changes of one thread share. It begins with the first change.

    `connect` opens a connection whose transaction takes the write lock when it begins.
    """

    def __init__(
        self, connect: Callable[[], contextlib.AbstractContextManager[sa.Connection]]
    ) -> None:
        self._connect = connect
        self._resources = contextlib.ExitStack()
        self._transaction: sa.RootTransaction | None = None
        self._changes = 0
        self._lost = False

    @property
    def connection(self) -> sa.Connection | None:
        """The connection that sees the changes so far; `None` before the first change."""
        return None if self._transaction is None else self._transaction.connection

    @contextlib.contextmanager
    def change(self) -> Iterator[sa.Connection]:
        """One change: if the block raises, what it wrote is undone, and nothing else."""
        if self._lost:
            raise UnavailableError("the database rolled back the transaction of several changes")
        transaction = self._transaction or self._begin()
        driver: Any = transaction.connection.connection.driver_connection
        is_first = self._changes == 0
        if not is_first:
            driver.execute("SAVEPOINT change")
        try:
            yield transaction.connection
        except BaseException:
            self._undo(driver, is_first=is_first)
            raise
        if not is_first:
            driver.execute("RELEASE change")
        self._changes += 1

    def _begin(self) -> sa.RootTransaction:
        try:
            connection = self._resources.enter_context(self._connect())
            self._transaction = connection.begin()
        except BaseException:
            self._resources.close()
            raise
        return self._transaction

    def _undo(self, driver: Any, *, is_first: bool) -> None:
        if is_first:
            self.close()
        elif driver.in_transaction:
            driver.execute("ROLLBACK TO change")
            driver.execute("RELEASE change")
        else:
            # SQLite rolls the transaction back by itself, for example if the disk is full.
            self._lost = True

    def commit(self) -> None:
        """Make all changes durable; if this raises, all of them are undone."""
        if self._lost:
            raise UnavailableError("the database rolled back the transaction of several changes")
        if self._transaction is not None:
            driver: Any = self._transaction.connection.connection.driver_connection
            try:
                self._transaction.commit()
            except BaseException:
                # SQLite may leave the transaction open, although SQLAlchemy considers it ended.
                driver.rollback()
                raise

    def close(self) -> None:
        """Undo uncommitted changes and release the write lock. Another change begins a new transaction."""
        transaction, self._transaction = self._transaction, None
        try:
            if transaction is not None:
                transaction.close()
        finally:
            self._resources.close()
