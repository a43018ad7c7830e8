"""The audit: one row for every change to the registry, in a chain of hashes.

A row's hash covers its content and the hash of the row before. The table `AUDIT_HEAD` has the number and hash
of the newest row. If rows are changed, removed, added or reordered, `verify` finds the first place where the
chain is broken; `verify` also compares the versions and aliases in the tables with the rows. It cannot find a
forgery that rewrites all later rows and the head as well. Against that, `anchoring` notes heads outside the
database, and `verify` takes them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tensorforge.errors import IntegrityError
from tensorforge.registry.database.audited_records import AuditedRecords
from tensorforge.registry.database.dialects import insert_if_absent
from tensorforge.registry.database.tables import AUDIT, AUDIT_HEAD
from tensorforge.registry.database.times import from_micros
from tensorforge.storage.prepared import Prepared

_LOCK_HEAD = Prepared(sa.select(AUDIT_HEAD).with_for_update())
_ADD_ROW = Prepared(AUDIT.insert(), columns=[column.name for column in AUDIT.columns])
_ADD_HEAD = insert_if_absent(AUDIT_HEAD, [column.name for column in AUDIT_HEAD.columns])
_UPDATE_HEAD = Prepared(
    AUDIT_HEAD.update().values(
        sequence=sa.bindparam("sequence"), hash=sa.bindparam("hash"), at_us=sa.bindparam("at_us")
    )
)

GENESIS = "0" * 64
"""What the first row has as the hash of the row before."""
_BATCH = 1_000
_CANONICAL = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_SORTED = json.JSONEncoder(sort_keys=True)
_HASHED = [column.name for column in AUDIT.columns if column.name != "hash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """Who did what to which version, when, why and on what evidence."""

    sequence: int
    at: datetime
    actor: str
    action: str
    model_id: str
    version: str
    from_state: str
    to_state: str
    reason: str
    evidence: Mapping[str, Any]
    forced: bool
    previous_hash: str
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditHead:
    """The number and hash of the newest row; the hash depends on every row up to it."""

    sequence: int
    hash: str


def create_head(connection: sa.Connection) -> None:
    """Create the head of an empty chain if this database has none."""
    _ADD_HEAD.all(connection, {"id": 1, "sequence": 0, "hash": GENESIS, "at_us": 0})


def entry_hash(row: Mapping[Any, Any]) -> str:
    """The hash of a row's content, which includes the hash of the row before."""
    canonical = _CANONICAL.encode([row[name] for name in _HASHED])
    return hashlib.sha256(canonical.encode()).hexdigest()


def append(
    connection: sa.Connection, facts: Mapping[str, Any], evidence: Mapping[str, Any], now_us: int
) -> dict[str, Any]:
    """Add a row after the newest one, in the caller's transaction, and return it.

    `facts` has the columns that do not depend on the row's place in the chain. The head stays locked until the
    transaction ends, so two rows never follow the same row. A row's time is never before that of the row before
    it, even if the machine's clock was set back.
    """
    (head,) = _LOCK_HEAD.all(connection, {})
    row = {
        "sequence": head["sequence"] + 1,
        "at_us": max(now_us, head["at_us"]),
        **facts,
        "evidence": _SORTED.encode(dict(evidence)),
        "previous_hash": head["hash"],
    }
    row["hash"] = entry_hash(row)
    _ADD_ROW.run(connection, row)
    _UPDATE_HEAD.run(connection, {name: row[name] for name in ("sequence", "hash", "at_us")})
    return row


def to_entry(row: Mapping[Any, Any]) -> AuditEntry:
    """A row of the audit as a value."""
    values = {name: row[name] for name in row if name not in ("at_us", "model_key", "evidence")}
    return AuditEntry(at=from_micros(row["at_us"]), evidence=json.loads(row["evidence"]), **values)


def verify(connection: sa.Connection, *known: AuditHead) -> AuditHead:
    """Recompute all hashes, compare the tables with them, and return the head.

    `IntegrityError` names the first row that was tampered with, or the first version or alias that is not as
    the audit tells. `known` are heads that were noted earlier. The chain must still contain them.
    """
    if connection.dialect.name == "postgresql":
        # Otherwise changes that are made meanwhile would look like tampering.
        connection.execute(sa.text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
    head = connection.execute(sa.select(AUDIT_HEAD)).one()
    noted = {each.sequence: each.hash for each in known}
    records, sequence, previous = AuditedRecords(), 0, GENESIS
    for row in _rows(connection):
        _check_row(row, sequence + 1, previous)
        sequence, previous = row["sequence"], row["hash"]
        if noted.pop(sequence, previous) != previous:
            raise IntegrityError(f"audit row {sequence} is not the one that was noted earlier")
        records.replay(row)
    if (sequence, previous) != (head.sequence, head.hash):
        raise IntegrityError(
            f"the audit ends at row {sequence}, but its head says {head.sequence}: rows are missing"
        )
    for missing in sorted(number for number in noted if number > 0):
        raise IntegrityError(f"audit row {missing}, noted earlier, is missing")
    records.compare(connection)
    return AuditHead(sequence=sequence, hash=previous)


def _rows(connection: sa.Connection) -> Iterator[Mapping[Any, Any]]:
    sequence = 0
    while True:
        query = sa.select(AUDIT).where(AUDIT.c.sequence > sequence).order_by(AUDIT.c.sequence)
        rows = connection.execute(query.limit(_BATCH)).mappings().all()
        yield from rows
        if len(rows) < _BATCH:
            return
        sequence = rows[-1]["sequence"]


def read_head(connection: sa.Connection) -> AuditHead:
    """The head as it is stored."""
    row = connection.execute(sa.select(AUDIT_HEAD)).one()
    return AuditHead(sequence=row.sequence, hash=row.hash)


def _check_row(row: Mapping[Any, Any], expected: int, previous: str) -> None:
    if row["sequence"] != expected:
        raise IntegrityError(f"audit row {expected} is missing: row {row['sequence']} follows")
    if row["previous_hash"] != previous:
        raise IntegrityError(f"audit row {expected} does not follow the row before it")
    if entry_hash(row) != row["hash"]:
        raise IntegrityError(f"audit row {expected} was changed after it was written")
