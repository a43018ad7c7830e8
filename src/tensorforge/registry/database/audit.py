"""The audit: one row for every change that matters, each bound to the row before it.

A row's hash covers its content and the hash of the row before, and the head keeps the newest of them. Whoever
changes, removes, adds or reorders rows breaks the chain at that place. Only someone who rewrites
everything after it, head included, goes unseen by the database alone; so `AuditHead` is worth
keeping elsewhere, and `verify` can be given one that was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tensorforge.errors import IntegrityError
from tensorforge.registry.database.tables import AUDIT, AUDIT_HEAD
from tensorforge.registry.database.times import from_micros
from tensorforge.storage.prepared import Prepared

_LOCK_HEAD = Prepared(sa.select(AUDIT_HEAD).with_for_update())
_ADD_ROW = Prepared(AUDIT.insert(), columns=[column.name for column in AUDIT.columns])
_MOVE_HEAD = Prepared(
    AUDIT_HEAD.update().values(
        sequence=sa.bindparam("sequence"), hash=sa.bindparam("hash"), at_us=sa.bindparam("at_us")
    )
)

GENESIS = "0" * 64
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
    """The newest row's number and hash: a promise about everything before it."""

    sequence: int
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFact:
    """What is to be written down; the rest of the row follows from its place in the chain."""

    actor: str
    action: str
    model_key: int
    model_id: str
    version: str = ""
    from_state: str = ""
    to_state: str = ""
    reason: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    forced: bool = False


def entry_hash(row: Mapping[Any, Any]) -> str:
    """The hash of a row's content, the hash of the row before included."""
    canonical = _CANONICAL.encode([row[name] for name in _HASHED])
    return hashlib.sha256(canonical.encode()).hexdigest()


def append(connection: sa.Connection, fact: AuditFact, now_us: int) -> dict[str, Any]:
    """Add a row behind the newest one, in the caller's transaction, and return it.

    The head stays locked until the transaction ends, so rows never fork. Time never runs backwards along
    the chain, even if a machine's clock does.
    """
    (head,) = _LOCK_HEAD.all(connection, {})
    row = {
        "sequence": head["sequence"] + 1,
        "at_us": max(now_us, head["at_us"]),
        "actor": fact.actor,
        "action": fact.action,
        "model_key": fact.model_key,
        "model_id": fact.model_id,
        "version": fact.version,
        "from_state": fact.from_state,
        "to_state": fact.to_state,
        "reason": fact.reason,
        "evidence": _SORTED.encode(dict(fact.evidence)),
        "forced": fact.forced,
        "previous_hash": head["hash"],
    }
    row["hash"] = entry_hash(row)
    _ADD_ROW.run(connection, row)
    _MOVE_HEAD.run(connection, {name: row[name] for name in ("sequence", "hash", "at_us")})
    return row


def to_entry(row: Mapping[Any, Any]) -> AuditEntry:
    """A row as a value."""
    values = {name: row[name] for name in row if name not in ("at_us", "model_key", "evidence")}
    return AuditEntry(at=from_micros(row["at_us"]), evidence=json.loads(row["evidence"]), **values)


def verify(connection: sa.Connection, known: AuditHead | None = None) -> AuditHead:
    """Recompute the whole chain; `IntegrityError` names the first row that is not as it was written.

    `known` is a head that was noted earlier: the chain must still contain it.
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
