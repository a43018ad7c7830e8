"""The journal of a run, which outlives its coordinator, and the lease that permits to write it.

The coordinator that leads a run has its lease: a row with a token that grows whenever another coordinator takes
it. Each append checks the token in the same transaction. So a coordinator that was replaced while it slept can
write nothing more, and it announces nothing that is not written.

From time to time a snapshot replaces all entries before it, so that the journal does not grow for ever.

A write whose answer is lost may be in the database or not. The next write finds out by the head of the chain,
so that an append may be repeated safely. A journal whose chain is broken is refused.

A lease lasts `lease_seconds` from its last renewal. The next coordinator waits that long, unless it can see
that the holder has ended (`ProcessIdentity.has_ended`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tensorforge.elastic.coordinator.journal_chain import (
    BEGINNING,
    Head,
    HeadFile,
    StoredEntry,
    chain,
    problem,
)
from tensorforge.elastic.coordinator.journal_records import (
    DurableState,
    Entry,
    Snapshot,
    entry_from_json,
    entry_to_json,
    follow,
    replay,
)
from tensorforge.errors import (
    ConflictError,
    EncodingError,
    IntegrityError,
    StaleGenerationError,
    UnavailableError,
)
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

DIGESTS = sa.Table(
    "coordinator_journal_digest",
    SCHEMA,
    sa.Column("run_id", sa.String(200), primary_key=True),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("previous", sa.String(64), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
)

HEADS = sa.Table(
    "coordinator_journal_head",
    SCHEMA,
    sa.Column("run_id", sa.String(200), primary_key=True),
    sa.Column("sequence", sa.BigInteger, nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
)

LEASES = sa.Table(
    "coordinator_lease",
    SCHEMA,
    sa.Column("run_id", sa.String(200), primary_key=True),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
)


@dataclass(frozen=True, slots=True)
class _Write:
    """An append or a compaction: the head after it, and what it adds to the state and to the counters."""

    head: Head
    entries: tuple[Entry, ...] = ()
    bytes_written: int = 0
    compacts: bool = False


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
        self._head = Head()
        self._uncertain: _Write | None = None
        self._head_file = None if database.path is None else HeadFile(database.path, run_id)
        self._state = DurableState(history=[])
        self._entries_since_snapshot = 0
        self._bytes_since_snapshot = 0
        database.create(SCHEMA)

    def open(self) -> DurableState:
        """Take the lease and return the state that the journal adds up to.

        While another coordinator has the lease: a `ConflictError` that names its process and the time left.
        If entries are missing or changed: an `IntegrityError` that names them, and the lease is not taken.
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
            self._require_intact(connection, rows)
            entries = list(self._decoded(rows))
        self._uncertain = None
        self._head = _head_of(rows)
        self._entries_since_snapshot = len(rows)
        self._bytes_since_snapshot = sum(len(row.text) for row in rows)
        self._state = replay(entries)
        if self.is_compaction_due:
            self.compact()
        return replay(self._decoded(rows))

    def append(self, entries: Iterable[Entry]) -> None:
        """Write all entries or none; without the lease: `StaleGenerationError`.

        After an `UnavailableError` the entries may be written or not. Call again with the same entries: they
        are written once.
        """
        written = tuple(entries)
        if not written:
            return
        earlier = self._look_up_uncertain_write()
        if earlier is not None and earlier.entries == written:
            return
        rows = chain(self._head, [entry_to_json(entry) for entry in written])
        size = sum(len(row.text) for row in rows)
        with self._writing(_Write(_head_of(rows), written, size)) as connection:
            self._insert(connection, rows)

    def _look_up_uncertain_write(self) -> _Write | None:
        """Find out whether the write whose answer was lost is in the database; return it if so."""
        uncertain = self._uncertain
        if uncertain is None:
            return None
        with self._database.write() as connection:
            self._require_lease(connection)
            stored = self._stored_head(connection) or Head()
        if stored == uncertain.head:
            self._settle(uncertain)
            return uncertain
        if stored.sequence > self._head.sequence:
            raise IntegrityError(
                f"the journal of run {self.run_id!r} ends with entry {stored.sequence}, which this "
                f"coordinator did not write; its own newest one is {self._head.sequence}"
            )
        self._uncertain = None
        return None

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
        self._look_up_uncertain_write()
        last = self._head.sequence
        rows = chain(self._head, [entry_to_json(Snapshot(state=self._state))])
        with self._writing(_Write(_head_of(rows), compacts=True)) as connection:
            self._insert(connection, rows)
            for table in (ENTRIES, DIGESTS):
                mine = table.c.run_id == self.run_id
                connection.execute(table.delete().where(mine & (table.c.sequence <= last)))

    @contextlib.contextmanager
    def _writing(self, write: _Write) -> Iterator[sa.Connection]:
        """A transaction that needs the lease; afterwards the journal's own state includes `write`.

        If the answer of the database is lost, the write stays uncertain until the next one.
        """
        self._require_database()
        try:
            with self._database.write() as connection:
                self._require_lease(connection)
                yield connection
                self._store_head(connection, write.head)
        except UnavailableError:
            self._uncertain = write
            raise
        self._settle(write)

    def _settle(self, write: _Write) -> None:
        self._uncertain = None
        self._head = write.head
        if self._head_file is not None:
            self._head_file.write(write.head)
        if write.compacts:
            self._entries_since_snapshot = self._bytes_since_snapshot = 0
            return
        self._entries_since_snapshot += len(write.entries)
        self._bytes_since_snapshot += write.bytes_written
        for entry in write.entries:
            self._state = follow(self._state, entry)

    def _insert(self, connection: sa.Connection, rows: list[StoredEntry]) -> None:
        now = self._now(connection)
        shared = {"run_id": self.run_id, "written_at": now, "lease_token": self._token}
        connection.execute(
            ENTRIES.insert(),
            [{**shared, "sequence": row.sequence, "entry": row.text} for row in rows],
        )
        connection.execute(
            DIGESTS.insert(),
            [
                {
                    "run_id": self.run_id,
                    "sequence": row.sequence,
                    "previous": row.previous,
                    "digest": row.digest,
                }
                for row in rows
            ],
        )

    def _store_head(self, connection: sa.Connection, head: Head) -> None:
        values = {"sequence": head.sequence, "digest": head.digest}
        mine = HEADS.update().where(HEADS.c.run_id == self.run_id)
        if not connection.execute(mine.values(**values)).rowcount:
            connection.execute(HEADS.insert().values(run_id=self.run_id, **values))

    def _stored_head(self, connection: sa.Connection) -> Head | None:
        query = sa.select(HEADS.c.sequence, HEADS.c.digest).where(HEADS.c.run_id == self.run_id)
        found = connection.execute(query).one_or_none()
        return None if found is None else Head(found.sequence, found.digest)

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
            return list(self._decoded(self._rows(connection)))

    def check(self) -> int:
        """Verify all entries without the lease, and return how many there are.

        If one is missing, changed or not readable: an `IntegrityError` that names it.
        """
        with self._database.read() as connection:
            rows = self._rows(connection)
            self._require_intact(connection, rows)
        return len(list(self._decoded(rows)))

    def _rows(self, connection: sa.Connection) -> list[StoredEntry]:
        same = (DIGESTS.c.run_id == ENTRIES.c.run_id) & (DIGESTS.c.sequence == ENTRIES.c.sequence)
        query = (
            sa.select(ENTRIES.c.sequence, ENTRIES.c.entry, DIGESTS.c.previous, DIGESTS.c.digest)
            .select_from(ENTRIES.outerjoin(DIGESTS, same))
            .where(ENTRIES.c.run_id == self.run_id)
            .order_by(ENTRIES.c.sequence)
        )
        return [StoredEntry(*row) for row in connection.execute(query)]

    def _decoded(self, rows: Iterable[StoredEntry]) -> Iterator[Entry]:
        for row in rows:
            try:
                yield entry_from_json(row.text)
            except EncodingError as error:
                raise self._broken(f"entry {row.sequence} is {error}") from error

    def _require_intact(self, connection: sa.Connection, rows: list[StoredEntry]) -> None:
        noted = None if self._head_file is None else self._head_file.read()
        wrong = problem(rows, self._stored_head(connection), noted)
        if wrong is not None:
            raise self._broken(wrong)

    def _broken(self, wrong: str) -> IntegrityError:
        beside = "" if self._head_file is None else f" and {self._head_file.path.name}"
        return IntegrityError(
            f"the journal of run {self.run_id!r} in {self._database.url} is damaged: {wrong}. Restore a "
            f"backup, or remove the database{beside} to begin with an empty journal"
        )

    def _require_database(self) -> None:
        if self._database.was_replaced:
            raise IntegrityError(
                f"the database {self._database.url} was deleted or replaced while this coordinator "
                "leads the run; what is written now would be lost"
            )

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


def _head_of(rows: Sequence[StoredEntry]) -> Head:
    return Head(rows[-1].sequence, rows[-1].digest or BEGINNING) if rows else Head()
