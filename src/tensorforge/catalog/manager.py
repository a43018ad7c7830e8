"""`CheckpointManager`: the records of all checkpoints of all runs, in a database that processes share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa

from tensorforge.catalog import queries
from tensorforge.catalog.chains.chains import chain_length
from tensorforge.catalog.chains.records import (
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    CreateCheckpointRequest,
    GcPolicy,
    RestoreCriteria,
    metric_of,
)
from tensorforge.catalog.chains.restore import (
    RestoreCandidate,
    RestoreRates,
    rank_candidates,
)
from tensorforge.catalog.chains.retention import RetentionDecision, decide_retention
from tensorforge.catalog.deletion import Deletions
from tensorforge.catalog.identifiers import TimeSortedIds
from tensorforge.catalog.measurements import Measurements
from tensorforge.catalog.schema import (
    CHECKPOINTS,
    SCHEMA,
    from_microseconds,
    to_microseconds,
    to_row,
)
from tensorforge.checkpoint.format.manifest import SUFFIX
from tensorforge.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidInputError,
)
from tensorforge.storage.database import IN_MEMORY, Database

_RUNS_PER_TRANSACTION = 32
_LIST_LIMIT = 5


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The checkpoints of one run in numbers, without deleted ones."""

    training_run_id: str
    checkpoints: int
    size_bytes: int
    last_step: int
    last_created_at: datetime


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """All candidates of a restore, best first, and how fast earlier restores were."""

    criteria: RestoreCriteria
    candidates: tuple[RestoreCandidate, ...]
    rates: RestoreRates | None

    @property
    def chosen(self) -> RestoreCandidate | None:
        """The best candidate that qualifies, or `None`."""
        best = self.candidates[0] if self.candidates else None
        return None if best is None or best.score.refusal else best

    @property
    def estimated_ms(self) -> int | None:
        """Milliseconds to restore the chosen candidate; `None` if no restore was measured yet."""
        if self.chosen is None or self.rates is None:
            return None
        return self.rates.estimate(self.chosen.chain)


def utc_now() -> datetime:
    """The current time in UTC."""
    return datetime.now(UTC)


class CheckpointManager:
    """Creates, completes, finds and deletes the records of checkpoints. Threads may share it.

    `database` is a `Database`, or a URL or path of one that the manager opens and closes itself; by default
    the records are in memory. Each method is one transaction, so processes that share a database never lose
    or duplicate a record. Transitions follow `CHECKPOINT_LIFECYCLE`; an illegal one is a `TransitionError`.

    Deletion has two phases. First the record becomes a tombstone, so that no reader finds the checkpoint; then
    `remove_files` is called with the record. If that fails, or the process ends, the next `gc` calls it again,
    so it must accept files that are missing already.
    """

    def __init__(
        self,
        gc_policy: GcPolicy | None = None,
        *,
        database: Database | str | Path = IN_MEMORY,
        remove_files: Callable[[CheckpointRecord], None] | None = None,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self.gc_policy = gc_policy or GcPolicy()
        self._owns_database = not isinstance(database, Database)
        self._database = database if isinstance(database, Database) else Database(database)
        self._database.create(SCHEMA)
        self._deletions = Deletions(self._database, remove_files, clock)
        self._clock = clock
        self._ids = TimeSortedIds()
        self.measurements = Measurements(self._database, clock)

    def create(
        self, request: CreateCheckpointRequest, now: datetime | None = None, note: str = ""
    ) -> CheckpointRecord:
        """Add a record with a new id in state `CREATING`.

        `note` is kept until the record is completed. An incremental checkpoint needs a restorable parent; see
        `CreateCheckpointRequest`.
        """
        moment = now or self._clock()
        record = CheckpointRecord(
            checkpoint_id=self._ids.next(moment),
            training_run_id=request.training_run_id,
            epoch=request.epoch,
            step=request.step,
            checkpoint_type=request.checkpoint_type,
            state=CheckpointState.CREATING,
            created_at=from_microseconds(to_microseconds(moment)),
            metrics=request.metrics,
            note=note,
        )
        needs_parent = request.checkpoint_type is CheckpointType.INCREMENTAL
        with self._database.write() as connection:
            if needs_parent or request.parent_id is not None:
                queries.lock_run(connection, request.training_run_id)
                record = replace(record, parent_id=queries.parent_for(connection, request))
            connection.execute(CHECKPOINTS.insert().values(to_row(record)))
        return record

    def adopt(self, record: CheckpointRecord) -> CheckpointRecord:
        """Add a record as it is, with its id. A rebuild of the catalog from manifests uses this.

        A tombstone without files and a corrupted record with this id are replaced; any other record with this
        id is an `AlreadyExistsError`.
        """
        if record.state is CheckpointState.DELETED:
            raise InvalidInputError(f"{record.checkpoint_id!r}: a deleted record cannot be adopted")
        name = CHECKPOINTS.c.checkpoint_id == record.checkpoint_id
        with self._database.write() as connection:
            queries.lock_run(connection, record.training_run_id)
            is_replaced = sa.or_(
                sa.and_(
                    CHECKPOINTS.c.state == CheckpointState.DELETED.value,
                    CHECKPOINTS.c.files_pending.is_(False),
                ),
                CHECKPOINTS.c.state == CheckpointState.CORRUPTED.value,
            )
            connection.execute(CHECKPOINTS.delete().where(name, is_replaced))
            if connection.scalar(sa.select(CHECKPOINTS.c.checkpoint_id).where(name)) is not None:
                raise AlreadyExistsError(
                    f"the catalog has checkpoint {record.checkpoint_id!r} already"
                )
            connection.execute(CHECKPOINTS.insert().values(to_row(record)))
        return record

    def complete(
        self,
        checkpoint_id: str,
        size_bytes: int,
        storage_path: str,
        *,
        verified_at: datetime | None = None,
    ) -> CheckpointRecord:
        """Record that the checkpoint is committed. `storage_path` is its prefix.

        The key of its manifest is accepted too; the record has the prefix.
        """
        if size_bytes < 0 or not storage_path:
            raise InvalidInputError(
                f"size_bytes = {size_bytes}, storage_path = {storage_path!r}: "
                "the size must not be negative and the path not empty"
            )
        verified = None if verified_at is None else to_microseconds(verified_at)
        values = {
            "size_bytes": size_bytes,
            "storage_path": storage_path.removesuffix(SUFFIX),
            "verified_at": verified,
            "note": "",
        }
        with self._database.write() as connection:
            return queries.transition_by_id(
                connection, checkpoint_id, CheckpointState.COMPLETE, **values
            )

    def mark_verified(self, checkpoint_id: str, now: datetime | None = None) -> CheckpointRecord:
        """Record that every byte of a complete checkpoint was read and found intact."""
        with self._database.write() as connection:
            record = queries.existing(connection, checkpoint_id, lock=True)
            _check_complete(record, "verified")
            return queries.update(
                connection, record, verified_at=to_microseconds(now or self._clock())
            )

    def replace_chain(
        self, checkpoint_id: str, size_bytes: int, commit: Callable[[], object] | None = None
    ) -> CheckpointRecord:
        """Record that a compaction made the checkpoint self-contained: it has no parent any more.

        `commit` is called while no child can be added. `ConflictError` if there is a child already.
        """
        with self._database.write() as connection:
            record = self._locked(connection, checkpoint_id)
            _check_complete(record, "compacted")
            children = queries.descendants(connection, checkpoint_id)
            if children:
                raise ConflictError(
                    f"checkpoint {checkpoint_id!r} is not the last of its chain: {_names(children)} build on it"
                )
            if commit is not None:
                commit()
            emergency = record.checkpoint_type is CheckpointType.EMERGENCY
            kind = CheckpointType.EMERGENCY if emergency else CheckpointType.FULL
            return queries.update(
                connection,
                record,
                parent_id=None,
                checkpoint_type=kind.value,
                size_bytes=size_bytes,
            )

    def mark_corrupted(self, checkpoint_id: str, reason: str = "") -> tuple[CheckpointRecord, ...]:
        """Mark a checkpoint as corrupted, and all that build on it.

        Returns the changed records, the named one first.
        """
        with self._database.write() as connection:
            record = self._locked(connection, checkpoint_id)
            marked = [
                queries.transition(connection, record, CheckpointState.CORRUPTED, note=reason)
            ]
            for child in queries.descendants(connection, checkpoint_id):
                note = f"its ancestor {checkpoint_id} is corrupted"
                marked.append(
                    queries.transition(connection, child, CheckpointState.CORRUPTED, note=note)
                )
        return tuple(marked)

    def get(self, checkpoint_id: str) -> CheckpointRecord | None:
        """The record with this id, deleted ones included; `None` if there is none."""
        with self._database.read() as connection:
            return queries.find(connection, checkpoint_id)

    def require_complete(self, checkpoint_id: str, what: str) -> CheckpointRecord:
        """The record of a complete checkpoint that is to be `what` (verified, compacted).

        `NotFoundError` if there is none, `ConflictError` if it is in another state.
        """
        with self._database.read() as connection:
            return _check_complete(queries.existing(connection, checkpoint_id), what)

    def chain_length(self, checkpoint_id: str) -> int:
        """The number of checkpoints that a restore of this one reads; `CheckpointError` if one is missing."""
        with self._database.read() as connection:
            record = queries.existing(connection, checkpoint_id)
            return chain_length(queries.chain(connection, record), checkpoint_id)

    def now(self) -> datetime:
        """The time of the catalog's clock."""
        return self._clock()

    def list_for_run(self, training_run_id: str) -> tuple[CheckpointRecord, ...]:
        """The checkpoints of a run, oldest first, without deleted ones."""
        with self._database.read() as connection:
            return tuple(queries.of_runs(connection, [training_run_id]))

    def list_runs(self) -> tuple[RunSummary, ...]:
        """Every run that has checkpoints; the run with the newest checkpoint comes first."""
        table = CHECKPOINTS.c
        last = sa.func.max(table.created_at)
        query = (
            sa.select(
                table.training_run_id,
                sa.func.count(),
                sa.func.sum(table.size_bytes),
                sa.func.max(table.step),
                last,
            )
            .where(queries.in_states(queries.LIVE))
            .group_by(table.training_run_id)
            .order_by(last.desc(), table.training_run_id)
        )
        with self._database.read() as connection:
            return tuple(
                RunSummary(run, count, int(size), step, from_microseconds(created))
                for run, count, size, step, created in connection.execute(query)
            )

    def get_latest(self, training_run_id: str) -> CheckpointRecord | None:
        """The restorable checkpoint with the highest step; of several at that step, the newest."""
        criteria = RestoreCriteria(training_run_id=training_run_id)
        with self._database.read() as connection:
            return next((record for record, _ in queries.restorable(connection, criteria)), None)

    def find_restore_point(self, criteria: RestoreCriteria) -> CheckpointRecord | None:
        """The checkpoint with the best `selection_score` whose chain is intact."""
        with self._database.read() as connection:
            return queries.best_restorable(connection, criteria)

    def restore_plan(self, criteria: RestoreCriteria) -> RestorePlan:
        """The choice of `find_restore_point` with all candidates and their scores, to explain the choice."""
        records = self.list_for_run(criteria.training_run_id)
        rates = self.measurements.restore_rates(criteria.training_run_id)
        return RestorePlan(criteria, rank_candidates(records, criteria), rates)

    def find_by_metric(
        self, training_run_id: str, metric_key: str, threshold: float, ascending: bool
    ) -> tuple[CheckpointRecord, ...]:
        """Complete checkpoints whose metric is better than `threshold`, best first.

        `ascending`: lower is better. A missing metric or NaN is never better.
        """
        sign = 1.0 if ascending else -1.0
        found = []
        for record in self.list_for_run(training_run_id):
            value = metric_of(record, metric_key)
            complete = record.state is CheckpointState.COMPLETE
            if complete and value is not None and sign * value < sign * threshold:
                found.append((sign * value, record))
        found.sort(key=lambda pair: pair[0])
        return tuple(record for _, record in found)

    def total_count(self) -> int:
        """The number of checkpoints in all runs, without deleted ones."""
        return self._total(sa.func.count())

    def total_size(self) -> int:
        """The bytes of all checkpoints in all runs, without deleted ones."""
        return self._total(sa.func.sum(CHECKPOINTS.c.size_bytes))

    def delete(
        self, checkpoint_id: str, *, cascade: bool = False, reason: str = "by request"
    ) -> tuple[str, ...]:
        """Delete a checkpoint. If others build on it: `ConflictError`, or with `cascade` delete those too.

        Returns the ids of the deleted checkpoints.
        """
        with self._database.write() as connection:
            record = self._locked(connection, checkpoint_id)
            children = queries.descendants(connection, checkpoint_id)
            if children and not cascade:
                raise ConflictError(
                    f"checkpoint {checkpoint_id!r} cannot be deleted: {_names(children)} "
                    "build on it; delete those first, or all together with cascade"
                )
            deleted = [*reversed(children), record]
            for each in deleted:
                self._deletions.mark(connection, each, reason)
        self.remove_deleted_files(record.training_run_id)
        return tuple(each.checkpoint_id for each in deleted)

    def retention(
        self, now: datetime | None = None, training_run_id: str | None = None
    ) -> Iterator[RetentionDecision]:
        """What `gc` would keep and delete now, run by run, with reasons. Changes nothing."""
        moment = now or self._clock()
        for runs in self._batches_of_runs(training_run_id):
            with self._database.read() as connection:
                yield from self._decide(connection, runs, moment)

    def gc(
        self, now: datetime | None = None, training_run_id: str | None = None
    ) -> tuple[str, ...]:
        """Delete what the policy does not keep, in one run or in all, and return the ids.

        Decision and tombstones are one transaction, so that no child is added to a checkpoint that is deleted.
        This also removes files that earlier deletions left behind.
        """
        moment = now or self._clock()
        deleted: list[str] = []
        for runs in self._batches_of_runs(training_run_id):
            with self._database.write() as connection:
                for run in sorted(runs):
                    queries.lock_run(connection, run)
                decisions = [d for d in self._decide(connection, runs, moment) if not d.keep]
                self._deletions.mark_all(connection, decisions, moment)
            deleted.extend(decision.checkpoint_id for decision in decisions)
        self.remove_deleted_files(training_run_id)
        self._deletions.drop_old(moment)
        return tuple(deleted)

    def remove_deleted_files(self, training_run_id: str | None = None) -> int:
        """Run the second phase of deletion for every tombstone that has files, and return how many succeeded.

        One that fails is tried again by the next call. With `training_run_id` only those of this run: runs that
        share a catalog may have different stores.
        """
        return self._deletions.remove_files(training_run_id)

    def with_files_left(self, training_run_id: str | None = None) -> tuple[CheckpointRecord, ...]:
        """The deleted checkpoints, of one run or of all, whose files could not be removed yet."""
        return tuple(self._deletions.pending(training_run_id))

    def close(self) -> None:
        """Close the database if the manager opened it; closing twice is fine."""
        if self._owns_database:
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _locked(self, connection: sa.Connection, checkpoint_id: str) -> CheckpointRecord:
        """A record, after locking its run."""
        run = queries.existing(connection, checkpoint_id).training_run_id
        queries.lock_run(connection, run)
        return queries.existing(connection, checkpoint_id, lock=True)

    def _batches_of_runs(self, training_run_id: str | None) -> Iterator[list[str]]:
        if training_run_id is not None:
            yield [training_run_id]
            return
        query = (
            sa.select(CHECKPOINTS.c.training_run_id)
            .where(queries.in_states(queries.LIVE))
            .distinct()
        )
        with self._database.read() as connection:
            runs = sorted(connection.scalars(query))
        for start in range(0, len(runs), _RUNS_PER_TRANSACTION):
            yield runs[start : start + _RUNS_PER_TRANSACTION]

    def _decide(
        self, connection: sa.Connection, runs: Sequence[str], now: datetime
    ) -> list[RetentionDecision]:
        groups = itertools.groupby(
            queries.of_runs(connection, runs), key=lambda record: record.training_run_id
        )
        return [
            decision
            for _, records in groups
            for decision in decide_retention(records, self.gc_policy, now)
        ]

    def _total(self, figure: sa.ColumnElement[Any]) -> int:
        with self._database.read() as connection:
            query = (
                sa.select(figure).select_from(CHECKPOINTS).where(queries.in_states(queries.LIVE))
            )
            return int(connection.scalar(query) or 0)


def _check_complete(record: CheckpointRecord, what: str) -> CheckpointRecord:
    if record.state is not CheckpointState.COMPLETE:
        raise ConflictError(
            f"checkpoint {record.checkpoint_id!r} is {record.state.value}; "
            f"only a complete one can be {what}"
        )
    return record


def _names(records: Sequence[CheckpointRecord]) -> str:
    names = ", ".join(record.checkpoint_id for record in records[:_LIST_LIMIT])
    more = len(records) - _LIST_LIMIT
    return f"{names} and {more} more" if more > 0 else names
