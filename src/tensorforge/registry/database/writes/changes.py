"""A change to the registry: its audit row and the messages about it, in one transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from tensorforge.registry.database import audit, outbox
from tensorforge.registry.database.rows import insertion_if_absent
from tensorforge.registry.database.tables import AUDIT_HEAD

_ADD_HEAD = insertion_if_absent(AUDIT_HEAD, [column.name for column in AUDIT_HEAD.columns])


def prepare(connection: sa.Connection) -> None:
    """Make the head of the audit if this database is new."""
    _ADD_HEAD.all(connection, {"id": 1, "sequence": 0, "hash": audit.GENESIS, "at_us": 0})


def record(connection: sa.Connection, fact: audit.AuditFact, now_us: int) -> Mapping[str, Any]:
    """Write down a change; it stands exactly if the caller's transaction does."""
    row = audit.append(connection, fact, now_us)
    outbox.enqueue(connection, row)
    return row
