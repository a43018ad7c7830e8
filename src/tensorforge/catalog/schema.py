"""The tables of the catalog, for SQLite and PostgreSQL, and the conversion between rows and records.

Times are whole microseconds since 1970, which both databases store exactly. Metrics are JSON text, because
the JSON types of the databases do not accept NaN.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tensorforge.catalog.chains.records import CheckpointRecord, CheckpointState, CheckpointType

SCHEMA = sa.MetaData()

CHECKPOINTS = sa.Table(
    "catalog_checkpoints",
    SCHEMA,
    sa.Column("checkpoint_id", sa.String(64), primary_key=True),
    sa.Column("training_run_id", sa.Text, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("checkpoint_type", sa.String(16), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("parent_id", sa.String(64)),
    sa.Column("metrics", sa.Text, nullable=False),
    sa.Column("storage_path", sa.Text, nullable=False),
    sa.Column("verified_at", sa.BigInteger),
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("deleted_at", sa.BigInteger),
    sa.Column("files_pending", sa.Boolean, nullable=False),
    sa.Index("catalog_by_run", "training_run_id", "state", "step", "created_at", "checkpoint_id"),
    sa.Index("catalog_by_parent", "parent_id"),
    sa.Index("catalog_by_state", "state", "files_pending"),
)

MEASUREMENTS = sa.Table(
    "catalog_measurements",
    SCHEMA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("training_run_id", sa.Text, nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("links", sa.Integer, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Column("at", sa.BigInteger, nullable=False),
    sa.Index("catalog_measurements_by_run", "training_run_id", "kind", "id"),
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_STATES = {state.value: state for state in CheckpointState}
_TYPES = {kind.value: kind for kind in CheckpointType}


def to_microseconds(moment: datetime) -> int:
    """The whole microseconds from 1970 to a time."""
    return (moment - _EPOCH) // _MICROSECOND


def from_microseconds(value: int) -> datetime:
    """The inverse of `to_microseconds`."""
    return _EPOCH + timedelta(microseconds=value)


def to_row(record: CheckpointRecord) -> dict[str, Any]:
    """The columns of a record; it must not be deleted."""
    verified = record.verified_at
    return {
        "checkpoint_id": record.checkpoint_id,
        "training_run_id": record.training_run_id,
        "epoch": record.epoch,
        "step": record.step,
        "checkpoint_type": record.checkpoint_type.value,
        "state": record.state.value,
        "size_bytes": record.size_bytes,
        "created_at": to_microseconds(record.created_at),
        "parent_id": record.parent_id,
        "metrics": encode_metrics(record.metrics),
        "storage_path": record.storage_path,
        "verified_at": None if verified is None else to_microseconds(verified),
        "note": record.note,
        "deleted_at": None,
        "files_pending": False,
    }


def from_row(row: sa.Row[Any]) -> CheckpointRecord:
    """The record of a row that has all columns of `CHECKPOINTS` in order."""
    # Columns are taken by position, which is far faster than by name.
    name, run, epoch, step, kind, state, size, created, parent, *rest = tuple(row)
    metrics, path, verified, note = rest[:4]
    return CheckpointRecord(
        checkpoint_id=name,
        training_run_id=run,
        epoch=epoch,
        step=step,
        checkpoint_type=_TYPES[kind],
        state=_STATES[state],
        size_bytes=size,
        created_at=from_microseconds(created),
        parent_id=parent,
        metrics={} if metrics == "{}" else json.loads(metrics),
        storage_path=path,
        verified_at=None if verified is None else from_microseconds(verified),
        note=note,
    )


def encode_metrics(metrics: Mapping[str, float]) -> str:
    """Metrics as JSON text; NaN and the infinities are allowed."""
    return json.dumps({name: float(value) for name, value in metrics.items()})
