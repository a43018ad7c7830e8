"""Deletion in two phases: first the record becomes a tombstone, then the files are removed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import sqlalchemy as sa

from tensorforge.catalog import queries
from tensorforge.catalog.chains.records import (
    CHECKPOINT_LIFECYCLE,
    CheckpointRecord,
    CheckpointState,
)
from tensorforge.catalog.chains.retention import RetentionDecision
from tensorforge.catalog.schema import CHECKPOINTS, from_row, to_microseconds
from tensorforge.errors import TensorForgeError
from tensorforge.storage.database import Database

_LOG = logging.getLogger(__name__)
_IDS_PER_STATEMENT = 500
KEEP_DELETED_SECONDS = 30 * 86_400.0
"""How long a tombstone stays after its files were removed, to tell when and why it was deleted."""


class Deletions:
    """Makes tombstones in a catalog and removes the files of deleted checkpoints."""

    def __init__(
        self,
        database: Database,
        remove_files: Callable[[CheckpointRecord], None] | None,
        clock: Callable[[], datetime],
    ) -> None:
        self._database = database
        self._remove_files = remove_files
        self._clock = clock

    def mark(self, connection: sa.Connection, record: CheckpointRecord, reason: str) -> None:
        """The first phase for one checkpoint."""
        queries.transition(
            connection,
            record,
            CheckpointState.DELETED,
            note=reason,
            deleted_at=to_microseconds(self._clock()),
            files_pending=self._remove_files is not None,
        )

    def mark_all(
        self, connection: sa.Connection, decisions: Sequence[RetentionDecision], now: datetime
    ) -> None:
        """The first phase for many checkpoints, in few statements."""
        for decision in decisions:
            CHECKPOINT_LIFECYCLE.require(decision.record.state, CheckpointState.DELETED)
        by_reason: dict[str, list[str]] = {}
        for decision in decisions:
            by_reason.setdefault("; ".join(decision.reasons), []).append(decision.checkpoint_id)
        values = {
            "state": CheckpointState.DELETED.value,
            "deleted_at": to_microseconds(now),
            "files_pending": self._remove_files is not None,
        }
        for reason, ids in by_reason.items():
            for start in range(0, len(ids), _IDS_PER_STATEMENT):
                some = CHECKPOINTS.c.checkpoint_id.in_(ids[start : start + _IDS_PER_STATEMENT])
                connection.execute(CHECKPOINTS.update().where(some).values(note=reason, **values))

    def remove_files(self, training_run_id: str | None = None) -> int:
        """The second phase, for all tombstones with files, of one run or of all.

        Returns the number of successes; the rest stay.
        """
        if self._remove_files is None:
            return 0
        finished = 0
        for record in self.pending(training_run_id):
            try:
                self._remove_files(record)
            except TensorForgeError as error:
                _LOG.warning("files of checkpoint %s remain: %s", record.checkpoint_id, error)
                continue
            with self._database.write() as connection:
                queries.update(connection, record, files_pending=False)
            finished += 1
        return finished

    def pending(self, training_run_id: str | None = None) -> list[CheckpointRecord]:
        """The tombstones with files, in the order in which the files are removed."""
        query = sa.select(CHECKPOINTS).where(
            CHECKPOINTS.c.state == CheckpointState.DELETED.value,
            CHECKPOINTS.c.files_pending.is_(True),
        )
        if training_run_id is not None:
            query = query.where(CHECKPOINTS.c.training_run_id == training_run_id)
        with self._database.read() as connection:
            # Newest first, so that the files of a parent are never removed before those of its children.
            latest = query.order_by(CHECKPOINTS.c.step.desc(), CHECKPOINTS.c.created_at.desc())
            return [from_row(row) for row in connection.execute(latest)]

    def drop_old(self, now: datetime) -> None:
        """Delete the tombstones that are older than `KEEP_DELETED_SECONDS` and have no files."""
        before = to_microseconds(now - timedelta(seconds=KEEP_DELETED_SECONDS))
        with self._database.write() as connection:
            connection.execute(
                CHECKPOINTS.delete().where(
                    CHECKPOINTS.c.state == CheckpointState.DELETED.value,
                    CHECKPOINTS.c.files_pending.is_(False),
                    CHECKPOINTS.c.deleted_at < before,
                )
            )
