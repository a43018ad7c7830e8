"""The audit: one row for every change to the registry, in a chain of hashes.

A row's hash covers its content and the hash of the row before. The table `AUDIT_HEAD` has the number and hash
of the newest row. If rows are changed, removed, added or reordered, `verify` finds the first place where the
chain is broken. It cannot find a forgery that rewrites all later rows and the head as well. Against that, note
an `AuditHead` outside the database and pass it to `verify` later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tensorforge.errors import IntegrityError
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


def verify(connection: sa.Connection, known: AuditHead | None = None) -> AuditHead:
    """Recompute all hashes and return the head; `IntegrityError` names the first row that was tampered with.

    `known` is a head that was noted earlier. The chain must still contain it.
    """
    head = connection.execute(sa.select(AUDIT_HEAD)).one()
    sequence, previous = 0, GENESIS
    while True:
        rows = (
            connection.execute(
                sa.select(AUDIT)
                .where(AUDIT.c.sequence > sequence)
                .order_by(AUDIT.c.sequence)
                .limit(_BATCH)
            )
            .mappings()
            .all()
        )
        for row in rows:
            _check_row(row, sequence + 1, previous)
            sequence, previous = row["sequence"], row["hash"]
            if known is not None and sequence == known.sequence and previous != known.hash:
                raise IntegrityError(f"audit row {sequence} is not the one that was noted earlier")
        if len(rows) < _BATCH:
            break
    if (sequence, previous) != (head.sequence, head.hash):
        raise IntegrityError(
            f"the audit ends at row {sequence}, but its head says {head.sequence}: rows are missing"
        )
    if known is not None and known.sequence > sequence:
        raise IntegrityError(f"audit row {known.sequence}, noted earlier, is missing")
    return AuditHead(sequence=sequence, hash=previous)


def _check_row(row: Mapping[Any, Any], expected: int, previous: str) -> None:
    if row["sequence"] != expected:
        raise IntegrityError(f"audit row {expected} is missing: row {row['sequence']} follows")
    if row["previous_hash"] != previous:
        raise IntegrityError(f"audit row {expected} does not follow the row before it")
    if entry_hash(row) != row["hash"]:
        raise IntegrityError(f"audit row {expected} was changed after it was written")
