"""The journal of a run, which outlives its coordinator, and the lease that permits to write it.

The coordinator that leads a run has its lease: a row with a token that grows whenever another coordinator takes
it. Each append checks the token in the same transaction. So a coordinator that was replaced while it slept can
write nothing more, and it announces nothing that is not written.

From time to time a snapshot replaces all entries before it, so that the journal does not grow for ever.

A lease lasts `lease_seconds` from its last renewal. The next coordinator waits that long, unless it can see
that the holder has ended (`ProcessIdentity.has_ended`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from tensorforge.elastic.coordinator.journal_records import (
    DurableState,
    Entry,
    Snapshot,
    entry_from_json,
    entry_to_json,
    follow,
    replay,
)
from tensorforge.errors import ConflictError, StaleGenerationError
from tensorforge.processes import ProcessIdentity
from tensorforge.storage.database import Database

COMPACT_AFTER = 256
"""So many entries since the last snapshot make the next one due."""
COMPACT_AFTER_BYTES = 4 << 20
"""So many bytes do, too, for large clusters with long entries."""

SCHEMA = sa.MetaData()

ENTRIES = sa.Table(
    "coordinator_journal",
    SCHEMA,
    sa.Column("run_id", sa.String(200), primary_key=True),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("written_at", sa.Float, nullable=False),
    sa.Column("lease_token", sa.BigInteger, nullable=False),
    sa.Column("entry", sa.Text, nullable=False),
)

LEASES = sa.Table(
    "coordinator_lease",
    SCHEMA,
    sa.Column("run_id", sa.String(200), primary_key=True),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
)


class Journal:
    """The journal of one run. Writing needs the lease of the run, which `open` takes.

    Calls block on the database; an event loop runs them in a thread. `clock` gives UTC seconds. On PostgreSQL
    the clock of the database server is used instead, because coordinators may run on several machines.
    """

    def __init__(
        self,
        database: Database,
        run_id: str = "default",
        *,
        lease_seconds: float = 10.0,
        holder: ProcessIdentity | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self.run_id = run_id
        self.lease_seconds = lease_seconds
        self._holder = holder or ProcessIdentity.current()
        self._clock = clock
        self._token: int | None = None
        self._sequence = 0
        self._state = DurableState(history=[])
        self._entries_since_snapshot = 0
        self._bytes_since_snapshot = 0
        database.create(SCHEMA)

    def open(self) -> DurableState:
        """Take the lease and return the state that the journal adds up to.

        While another coordinator has the lease: a `ConflictError` that names its process and the time left.
        """
        with self._database.write() as connection:
            now = self._now(connection)
            lease = self._lease(connection)
            if lease is not None and now < lease.expires_at:
                holder = ProcessIdentity.from_text(lease.holder)
                has_ended = holder is not None and holder.has_ended()
                if lease.token != self._token and not has_ended:
                    raise ConflictError(
                        f"run {self.run_id!r} is led by {holder or lease.holder}; its "
                        f"lease ends in {lease.expires_at - now:.1f} s unless it is renewed"
                    )
            self._token = 1 if lease is None else lease.token + 1
            values = {
                "token": self._token,
                "holder": self._holder.to_text(),
                "expires_at": now + self.lease_seconds,
            }
            if lease is None:
                connection.execute(LEASES.insert().values(run_id=self.run_id, **values))
            else:
                connection.execute(self._update_lease(lease.token, values))
            rows = self._rows(connection)
        self._sequence = rows[-1].sequence if rows else 0
        self._entries_since_snapshot = len(rows)
        self._bytes_since_snapshot = sum(len(row.entry) for row in rows)
        lines = [row.entry for row in rows]
        self._state = replay(map(entry_from_json, lines))
        if self.is_compaction_due:
            self.compact()
        return replay(map(entry_from_json, lines))

    def append(self, entries: Iterable[Entry]) -> None:
        """Write all entries or none; without the lease: `StaleGenerationError`."""
        written = list(entries)
        lines = [entry_to_json(entry) for entry in written]
        with self._database.write() as connection:
            self._require_lease(connection)
            self._insert(connection, lines)
        self._sequence += len(lines)
        self._entries_since_snapshot += len(lines)
        self._bytes_since_snapshot += sum(map(len, lines))
        for entry in written:
            self._state = follow(self._state, entry)

    @property
    def is_compaction_due(self) -> bool:
        """Whether enough was written since the last snapshot."""
        return (
            self._entries_since_snapshot >= COMPACT_AFTER
            or self._bytes_since_snapshot >= COMPACT_AFTER_BYTES
        )

    def compact(self) -> None:
        """Replace all entries by a snapshot; without the lease: `StaleGenerationError`.

        This is one transaction, so a later `open` returns the same state even after a crash.
        """
        line = entry_to_json(Snapshot(state=self._state))
        with self._database.write() as connection:
            self._require_lease(connection)
            self._insert(connection, [line])
            mine = ENTRIES.c.run_id == self.run_id
            connection.execute(
                ENTRIES.delete().where(mine & (ENTRIES.c.sequence <= self._sequence))
            )
        self._sequence += 1
        self._entries_since_snapshot = self._bytes_since_snapshot = 0

    def _insert(self, connection: sa.Connection, lines: list[str]) -> None:
        now = self._now(connection)
        connection.execute(
            ENTRIES.insert(),
            [
                {
                    "run_id": self.run_id,
                    "sequence": self._sequence + offset,
                    "written_at": now,
                    "lease_token": self._token,
                    "entry": line,
                }
                for offset, line in enumerate(lines, start=1)
            ],
        )

    def renew(self) -> None:
        """Extend the lease; if another coordinator has it now: `StaleGenerationError`."""
        with self._database.write() as connection:
            self._require_lease(connection)
            expires_at = self._now(connection) + self.lease_seconds
            connection.execute(self._update_lease(self._token, {"expires_at": expires_at}))

    def release(self) -> None:
        """Give up the lease, if this coordinator has it, so that the next one need not wait."""
        if self._token is None:
            return
        with self._database.write() as connection:
            connection.execute(self._update_lease(self._token, {"expires_at": 0.0}))
        self._token = None

    def entries(self) -> list[Entry]:
        """The entries that are written now, oldest first; the first one may be a snapshot."""
        with self._database.read() as connection:
            return [entry_from_json(row.entry) for row in self._rows(connection)]

    def _rows(self, connection: sa.Connection) -> Sequence[Any]:
        query = sa.select(ENTRIES.c.sequence, ENTRIES.c.entry)
        mine = query.where(ENTRIES.c.run_id == self.run_id)
        return connection.execute(mine.order_by(ENTRIES.c.sequence)).all()

    def _require_lease(self, connection: sa.Connection) -> None:
        lease = self._lease(connection)
        if self._token is None or lease is None or lease.token != self._token:
            holder: object = "nobody"
            if lease is not None:
                holder = ProcessIdentity.from_text(lease.holder) or lease.holder
            raise StaleGenerationError(
                f"this coordinator does not lead run {self.run_id!r} any more; {holder} does"
            )

    def _lease(self, connection: sa.Connection) -> Any:
        query = sa.select(LEASES.c.token, LEASES.c.holder, LEASES.c.expires_at)
        return connection.execute(
            query.where(LEASES.c.run_id == self.run_id).with_for_update()
        ).one_or_none()

    def _update_lease(self, token: int | None, values: dict[str, object]) -> sa.Update:
        mine = (LEASES.c.run_id == self.run_id) & (LEASES.c.token == token)
        return LEASES.update().where(mine).values(**values)

    def _now(self, connection: sa.Connection) -> float:
        if self._database.is_sqlite:
            return self._clock()
        moment = sa.func.extract("epoch", sa.func.clock_timestamp())
        return float(connection.scalar(sa.select(moment)) or 0.0)
