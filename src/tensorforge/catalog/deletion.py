"""Deletion in two phases: a tombstone that no reader finds, then the files."""

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
"""How long a tombstone whose files are gone still tells when and why."""


class Deletions:
    """The tombstones of a catalog, and the files that wait for them."""

    def __init__(
        self,
        database: Database,
        remove_files: Callable[[CheckpointRecord], None] | None,
        clock: Callable[[], datetime],
    ) -> None:
        self._database = database
        self._remove_files = remove_files
        self._clock = clock

    def bury(self, connection: sa.Connection, record: CheckpointRecord, reason: str) -> None:
        """The first phase, for one checkpoint."""
        queries.move(
            connection,
            record,
            CheckpointState.DELETED,
            note=reason,
            deleted_at=to_microseconds(self._clock()),
            files_pending=self._remove_files is not None,
        )

    def bury_all(
        self, connection: sa.Connection, doomed: Sequence[RetentionDecision], now: datetime
    ) -> None:
        """The first phase, for many, in few statements."""
        for decision in doomed:
            CHECKPOINT_LIFECYCLE.require(decision.record.state, CheckpointState.DELETED)
        names: dict[str, list[str]] = {}
        for decision in doomed:
            names.setdefault("; ".join(decision.reasons), []).append(decision.checkpoint_id)
        values = {
            "state": CheckpointState.DELETED.value,
            "deleted_at": to_microseconds(now),
            "files_pending": self._remove_files is not None,
        }
        for reason, alike in names.items():
            for start in range(0, len(alike), _IDS_PER_STATEMENT):
                some = CHECKPOINTS.c.checkpoint_id.in_(alike[start : start + _IDS_PER_STATEMENT])
                connection.execute(CHECKPOINTS.update().where(some).values(note=reason, **values))

    def remove_files(self) -> int:
        """The second phase; one that fails stays for the next time. Returns how many were finished."""
        if self._remove_files is None:
            return 0
        finished = 0
        for record in self._pending():
            try:
                self._remove_files(record)
            except TensorForgeError as error:
                _LOG.warning("files of checkpoint %s remain: %s", record.checkpoint_id, error)
                continue
            with self._database.write() as connection:
                queries.update(connection, record, files_pending=False)
            finished += 1
        return finished

    def _pending(self) -> list[CheckpointRecord]:
        query = sa.select(CHECKPOINTS).where(
            CHECKPOINTS.c.state == CheckpointState.DELETED.value,
            CHECKPOINTS.c.files_pending.is_(True),
        )
        with self._database.read() as connection:
            # Newest first: whatever happens, no incremental outlives its parent's files.
            latest = query.order_by(CHECKPOINTS.c.step.desc(), CHECKPOINTS.c.created_at.desc())
            return [from_row(row) for row in connection.execute(latest)]

    def forget(self, now: datetime) -> None:
        """Drop the tombstones that are old and have no files any more."""
        before = to_microseconds(now - timedelta(seconds=KEEP_DELETED_SECONDS))
        with self._database.write() as connection:
            connection.execute(
                CHECKPOINTS.delete().where(
                    CHECKPOINTS.c.state == CheckpointState.DELETED.value,
                    CHECKPOINTS.c.files_pending.is_(False),
                    CHECKPOINTS.c.deleted_at < before,
                )
            )
