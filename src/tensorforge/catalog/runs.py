"""`RunCheckpoints`: saves and restores one training run and records this in the catalog.

A save creates a record, writes the files, reads and verifies them, and completes the record. If the process
ends in between, `sweep` completes or deletes the record at the next start.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from tensorforge.catalog import upkeep
from tensorforge.catalog.chains.records import (
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    CreateCheckpointRequest,
    RestoreCriteria,
)
from tensorforge.catalog.compaction import compact
from tensorforge.catalog.increments import ChangedChunks, ContentCache, IncrementPolicy
from tensorforge.catalog.manager import CheckpointManager
from tensorforge.catalog.pending import PendingSave
from tensorforge.catalog.stored_records import (
    prefix_of,
    stored_size,
    with_record,
)
from tensorforge.checkpoint import store_index
from tensorforge.checkpoint.format.manifest import CheckpointManifest
from tensorforge.checkpoint.options import (
    CheckpointLoadResult,
    LoadOptions,
    Progress,
    SaveOptions,
    Stateful,
)
from tensorforge.checkpoint.ranks.coordinators import DistributedCoordinator, SingleProcess
from tensorforge.checkpoint.validator import CheckpointValidator, EveryByteIsIntact
from tensorforge.encoding import decode, encode
from tensorforge.errors import (
    CheckpointError,
    CheckpointErrorType,
    ConflictError,
    NotFoundError,
    TensorForgeError,
)
from tensorforge.processes import ProcessIdentity

if TYPE_CHECKING:
    from tensorforge.checkpoint.api import DistributedCheckpoint

_LOG = logging.getLogger(__name__)
_AGREEMENT_SECONDS = 60.0
_UNUSABLE = (CheckpointErrorType.CORRUPTED_CHECKPOINT, CheckpointErrorType.INCOMPATIBLE_VERSION)


@dataclass(frozen=True, slots=True)
class _Decision:
    """A message of rank 0 to the others: the record to save or restore, or the error of rank 0."""

    record: CheckpointRecord | None
    parent: str | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Restored:
    """The restored record, the result and duration of the load, and the ids of damaged checkpoints it met."""

    record: CheckpointRecord
    result: CheckpointLoadResult
    seconds: float
    damaged: tuple[str, ...] = ()


class RunCheckpoints:
    """Saves and restores one run. Every rank has one; only rank 0 needs the catalog.

    `increments` turns on incremental checkpoints; with `None` every checkpoint is full. With `collects_garbage`
    each save also deletes what the manager's policy does not keep. Make the `manager` with `remover(store)` for
    the same store, so that deletions remove the files.
    """

    def __init__(
        self,
        manager: CheckpointManager | None,
        checkpoint: DistributedCheckpoint,
        training_run_id: str,
        *,
        coordinator: DistributedCoordinator | None = None,
        increments: IncrementPolicy | None = None,
        collects_garbage: bool = False,
    ) -> None:
        self.training_run_id = training_run_id
        self._checkpoint = checkpoint
        self._store = checkpoint.storage
        self._coordinator = coordinator or SingleProcess()
        self._increments = increments
        self._collects_garbage = collects_garbage
        self._cache = ContentCache(increments.base_memory if increments else 0)
        self._compaction: threading.Thread | None = None
        self._pending: PendingSave | None = None
        self._is_first = self._coordinator.rank == 0
        if self._is_first and manager is None:
            raise ConflictError("rank 0 needs a catalog")
        self._manager = manager
        self._is_swept = False
        self.last_increment: ChangedChunks | None = None

    def sweep(self) -> upkeep.SweepReport:
        """Complete or delete unfinished saves of earlier processes; the first save or restore calls this."""
        self._is_swept = True
        if not self._is_first:
            return upkeep.SweepReport()
        return upkeep.sweep(self._catalog, self._store, training_run_id=self.training_run_id)

    def save(
        self,
        model: Stateful,
        optimizer: Stateful | None = None,
        *,
        epoch: int,
        step: int,
        metrics: Mapping[str, float] | None = None,
        checkpoint_type: CheckpointType | None = None,
        options: SaveOptions | None = None,
        progress: Progress | None = None,
    ) -> CheckpointRecord:
        """Save, verify and record. The checkpoint is complete when this returns.

        Without a type the checkpoint is incremental if increments are on and the chain is not full. If this
        raises `CheckpointError`, the files are removed and the record is deleted.
        """
        with self._saving(epoch, step, metrics, checkpoint_type, options) as (record, chosen):
            started = time.perf_counter()
            self._checkpoint.save(model, optimizer, chosen, progress=progress)
            seconds = time.perf_counter() - started
        return self._end(record, seconds)

    def async_save(
        self,
        model: Stateful,
        optimizer: Stateful | None = None,
        *,
        epoch: int,
        step: int,
        metrics: Mapping[str, float] | None = None,
        checkpoint_type: CheckpointType | None = None,
        options: SaveOptions | None = None,
        progress: Progress | None = None,
    ) -> PendingSave:
        """Copy the state, start to save, verify and record the copy in the background, and return.

        When this returns, the caller may change the state. The error of the save is raised by the result, or
        else by the next call.
        """
        with self._saving(epoch, step, metrics, checkpoint_type, options) as (record, chosen):
            started = time.perf_counter()
            handle = self._checkpoint.async_save(model, optimizer, chosen, progress=progress)
            stalled = time.perf_counter() - started

        def finish() -> CheckpointRecord:
            try:
                handle.result()
            except BaseException as error:
                self._give_up(record, error)
                raise
            return self._end(record, stalled)

        self._pending = PendingSave(record, finish)
        return self._pending

    @contextlib.contextmanager
    def _saving(
        self,
        epoch: int,
        step: int,
        metrics: Mapping[str, float] | None,
        kind: CheckpointType | None,
        options: SaveOptions | None,
    ) -> Iterator[tuple[CheckpointRecord, SaveOptions]]:
        """Yields a new record and the options of its save; if the block raises, the record is deleted."""
        self._prepare()
        request = CreateCheckpointRequest(
            training_run_id=self.training_run_id, epoch=epoch, step=step, metrics=metrics or {}
        )
        decision = self._agree(lambda: self._begin(request, kind))
        record = _required(decision)
        try:
            yield record, self._save_options(record, decision.parent, options or SaveOptions())
        except BaseException as error:
            self._give_up(record, error)
            raise

    def _end(self, record: CheckpointRecord, seconds: float) -> CheckpointRecord:
        done = _required(self._agree(lambda: _Decision(self._finish(record, seconds))))
        self._compact_if_due(done)
        if self._collects_garbage and self._is_first:
            self._collect_garbage()
        return done

    def _collect_garbage(self) -> None:
        try:
            self._catalog.gc(training_run_id=self.training_run_id)
        except TensorForgeError as error:
            # The save is complete; the next one collects again.
            _LOG.warning("no checkpoint of %s was deleted: %s", self.training_run_id, error)

    def emergency(
        self,
        model: Stateful,
        optimizer: Stateful | None = None,
        *,
        epoch: int,
        step: int,
        metrics: Mapping[str, float] | None = None,
    ) -> CheckpointRecord:
        """Save before the process ends; incremental if increments are on and there is a parent."""
        return self.save(
            model,
            optimizer,
            epoch=epoch,
            step=step,
            metrics=metrics,
            checkpoint_type=CheckpointType.EMERGENCY,
        )

    def restore(
        self,
        model: Stateful,
        optimizer: Stateful | None = None,
        *,
        criteria: RestoreCriteria | None = None,
        options: LoadOptions | None = None,
    ) -> Restored:
        """Load the best checkpoint that meets the criteria; by default the best of the run.

        A damaged checkpoint is marked as corrupted, and the next best one is loaded. One of a newer version of
        the format, or without files in this store, is passed over. `NotFoundError` if none is left.
        """
        self._prepare()
        wanted = criteria or RestoreCriteria(training_run_id=self.training_run_id)
        damaged: list[str] = []
        while True:
            record = _required(self._agree(lambda: self._choose(wanted, damaged)))
            chosen = replace(options or LoadOptions(), checkpoint_prefix=record.storage_path)
            started = time.perf_counter()
            try:
                result = self._checkpoint.load(model, optimizer, chosen)
            except CheckpointError as error:
                if error.type not in _UNUSABLE:
                    raise
                damaged.append(record.checkpoint_id)
                if self._is_first and error.type is CheckpointErrorType.CORRUPTED_CHECKPOINT:
                    self._catalog.mark_corrupted(record.checkpoint_id, str(error))
                continue
            seconds = time.perf_counter() - started
            self._measure_restore(record, seconds)
            return Restored(record, result, seconds, tuple(damaged))

    def compact(self, checkpoint_id: str) -> CheckpointRecord:
        """Make the last checkpoint of a chain self-contained. Only rank 0 calls this."""
        return compact(self._catalog, self._store, checkpoint_id)

    def wait(self) -> None:
        """Wait for a save and a compaction in the background.

        The error of the save is raised unless its result has raised it already. The error of a compaction,
        which has then changed nothing, is logged.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.settle()
        thread, self._compaction = self._compaction, None
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """Wait like `wait`. The catalog and the `DistributedCheckpoint` stay open; the caller closes them."""
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self) -> None:
        self.wait()
        if not self._is_swept:
            self.sweep()

    @property
    def _catalog(self) -> CheckpointManager:
        if self._manager is None:
            raise ConflictError(
                f"rank {self._coordinator.rank} has no catalog; call this on rank 0"
            )
        return self._manager

    def _agree(self, decide: Callable[[], _Decision]) -> _Decision:
        """Rank 0 decides and sends the decision, or its error, to the others."""
        if not self._is_first:
            return decode(
                json.loads(self._coordinator.broadcast(None, _AGREEMENT_SECONDS)), _Decision
            )
        try:
            decision = decide()
        except Exception as error:
            self._send(_Decision(None, error=str(error)))
            raise
        self._send(decision)
        return decision

    def _send(self, decision: _Decision) -> None:
        self._coordinator.broadcast(json.dumps(encode(decision)).encode(), _AGREEMENT_SECONDS)

    def _begin(self, request: CreateCheckpointRequest, kind: CheckpointType | None) -> _Decision:
        parent = None
        if kind is not CheckpointType.FULL and self._increments is not None:
            parent = self._usable_parent(request, self._increments)
        if kind is CheckpointType.INCREMENTAL and parent is None:
            raise ConflictError(
                f"run {self.training_run_id!r} has no parent for an incremental checkpoint: "
                "increments are turned off, the chain is full, or there is no checkpoint yet"
            )
        if kind is not CheckpointType.EMERGENCY:
            kind = CheckpointType.FULL if parent is None else CheckpointType.INCREMENTAL
        asked = replace(
            request,
            checkpoint_type=kind,
            parent_id=None if parent is None else parent.checkpoint_id,
        )
        record = self._catalog.create(asked, note=ProcessIdentity.current().to_text())
        return _Decision(record, None if parent is None else parent.storage_path)

    def _usable_parent(
        self, request: CreateCheckpointRequest, policy: IncrementPolicy
    ) -> CheckpointRecord | None:
        while True:
            criteria = RestoreCriteria(
                training_run_id=self.training_run_id,
                max_epoch=request.epoch,
                max_step=request.step,
            )
            plan = self._catalog.restore_plan(criteria)
            if plan.chosen is None or len(plan.chosen.chain) >= policy.max_chain:
                return None
            parent = plan.chosen.record
            try:
                store_index.read_manifest(self._store, parent.storage_path)
            except CheckpointError as error:
                self._catalog.mark_corrupted(parent.checkpoint_id, str(error))
                continue
            return parent

    def _save_options(
        self, record: CheckpointRecord, parent: str | None, options: SaveOptions
    ) -> SaveOptions:
        self.last_increment = None
        if parent is not None and self._increments is not None:
            manifest = store_index.read_manifest(self._store, parent)
            self.last_increment = ChangedChunks(
                self._store, manifest, self._increments, self._cache
            )
        return replace(
            options,
            checkpoint_prefix=prefix_of(record.training_run_id, record.checkpoint_id),
            custom_metadata=with_record(options.custom_metadata, record),
            increment=self.last_increment,
        )

    def _give_up(self, record: CheckpointRecord, error: BaseException) -> None:
        if not self._is_first:
            return
        try:
            self._catalog.delete(record.checkpoint_id, reason=f"its save failed: {error}")
        except TensorForgeError as problem:
            # The caller gets the error of the save itself; the next sweep deletes the record.
            _LOG.warning("record %s stays until the next sweep: %s", record.checkpoint_id, problem)

    def _finish(self, record: CheckpointRecord, seconds: float) -> CheckpointRecord:
        prefix = prefix_of(record.training_run_id, record.checkpoint_id)
        manifest = store_index.read_manifest(self._store, prefix)
        try:
            self._verify_own(manifest)
        except CheckpointError as error:
            self._catalog.delete(record.checkpoint_id, reason=f"damaged during the save: {error}")
            raise
        size = stored_size(self._store, manifest)
        verified = self._catalog.now()
        done = self._catalog.complete(record.checkpoint_id, size, prefix, verified_at=verified)
        self._catalog.measurements.record_save(self.training_run_id, size, seconds)
        return done

    def _verify_own(self, manifest: CheckpointManifest) -> None:
        """Read and verify the files of this save; other files it refers to were verified by their saves."""
        CheckpointValidator(self._store, [EveryByteIsIntact(only_own=True)]).validate_manifest(
            manifest
        ).raise_if_invalid()

    def _choose(self, criteria: RestoreCriteria, damaged: list[str]) -> _Decision:
        for candidate in self._catalog.restore_plan(criteria).candidates:
            record = candidate.record
            if candidate.score.refusal or record.checkpoint_id in damaged:
                continue
            if store_index.exists(self._store, record.storage_path):
                return _Decision(record)
            _LOG.warning("%s has no files in %s", record.checkpoint_id, self._store.url)
        tried = f"; damaged: {', '.join(damaged)}" if damaged else ""
        raise NotFoundError(
            f"run {criteria.training_run_id!r} has no checkpoint that can be restored{tried}"
        )

    def _measure_restore(self, record: CheckpointRecord, seconds: float) -> None:
        if self._is_first:
            chosen = self._catalog.restore_plan(
                RestoreCriteria(training_run_id=record.training_run_id, max_step=record.step)
            ).chosen
            if chosen is not None and chosen.record.checkpoint_id == record.checkpoint_id:
                self._catalog.measurements.record_restore(
                    record.training_run_id, len(chosen.chain), chosen.bytes_to_read, seconds
                )

    def _compact_if_due(self, record: CheckpointRecord) -> None:
        policy = self._increments
        if policy is None or not self._is_first or record.is_self_contained:
            return
        if self._catalog.chain_length(record.checkpoint_id) < policy.max_chain:
            return

        def work() -> None:
            try:
                compact(self._catalog, self._store, record.checkpoint_id)
            except TensorForgeError as error:
                _LOG.warning("checkpoint %s was not compacted: %s", record.checkpoint_id, error)

        name = f"compact {record.checkpoint_id}"
        self._compaction = threading.Thread(target=work, name=name, daemon=True)
        self._compaction.start()


def _required(decision: _Decision) -> CheckpointRecord:
    if decision.record is None:
        raise CheckpointError(f"rank 0 failed: {decision.error}", "", CheckpointErrorType.UNKNOWN)
    if decision.record.state is CheckpointState.DELETED:
        raise ConflictError(
            f"checkpoint {decision.record.checkpoint_id!r} was deleted in the meantime"
        )
    return decision.record
