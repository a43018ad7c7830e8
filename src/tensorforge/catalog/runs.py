"""The checkpoints of one training run: written by `DistributedCheckpoint`, recorded in the catalog.

A save, in order: the record is created, the files are written, read back and verified, the record is completed.
Whatever ends in between is found by `sweep` at the next start.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
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
from tensorforge.catalog.incremental_store import (
    described,
    owner_of_this_process,
    prefix_of,
    stored_size,
)
from tensorforge.catalog.increments import ChangedChunks, ContentMemory, IncrementPolicy
from tensorforge.catalog.manager import CheckpointManager
from tensorforge.catalog.pending import PendingSave
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

if TYPE_CHECKING:
    from tensorforge.checkpoint.api import DistributedCheckpoint

_LOG = logging.getLogger(__name__)
_AGREEMENT_SECONDS = 60.0
_UNUSABLE = (CheckpointErrorType.CORRUPTED_CHECKPOINT, CheckpointErrorType.INCOMPATIBLE_VERSION)


@dataclass(frozen=True, slots=True)
class _Decision:
    """What rank 0 tells the others: the record to save or restore, or why there is none."""

    record: CheckpointRecord | None
    parent: str | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored, how long that took, and which checkpoints turned out to be damaged on the way."""

    record: CheckpointRecord
    result: CheckpointLoadResult
    seconds: float
    damaged: tuple[str, ...] = ()


class RunCheckpoints:
    """Saves and restores one run. On several ranks each has one; only rank 0 needs the catalog.

    `increments` turns on incremental checkpoints and says how far they go; without it every one is full.
    `manager` should remove files from the same store (`remover(store)`), so that `gc` can delete.
    """

    def __init__(
        self,
        manager: CheckpointManager | None,
        checkpoint: DistributedCheckpoint,
        training_run_id: str,
        *,
        coordinator: DistributedCoordinator | None = None,
        increments: IncrementPolicy | None = None,
    ) -> None:
        self.training_run_id = training_run_id
        self._checkpoint = checkpoint
        self._store = checkpoint.storage
        self._coordinator = coordinator or SingleProcess()
        self._increments = increments
        self._memory = ContentMemory(increments.base_memory if increments else 0)
        self._compaction: threading.Thread | None = None
        self._pending: PendingSave | None = None
        self._is_first = self._coordinator.rank == 0
        if self._is_first and manager is None:
            raise ConflictError("rank 0 needs a catalog")
        self._manager = manager
        self._is_swept = False
        self.last_increment: ChangedChunks | None = None

    def sweep(self) -> upkeep.SweepReport:
        """Settle what an earlier process of this run left unfinished; the first save or restore does it too."""
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
        """Save, verify and record; the checkpoint is complete when this returns.

        Without a type it is incremental where that is turned on and the chain has room, and full otherwise.
        If it raises `CheckpointError`, neither files nor a live record are left.
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
        """Copy the state and return; it is saved, verified and recorded in the background.

        When this returns, the state may change. A failure is raised by the result, or else by the next call.
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
        """A record, and the options to save it by; if the block raises, the record goes."""
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
        return done

    def emergency(
        self,
        model: Stateful,
        optimizer: Stateful | None = None,
        *,
        epoch: int,
        step: int,
        metrics: Mapping[str, float] | None = None,
    ) -> CheckpointRecord:
        """Save in haste before the process ends: what changed since the last checkpoint, if there is one."""
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
        """Load the best checkpoint that meets the criteria, all of the run by default.

        One that turns out to be damaged is marked as corrupted, and the next best is taken.
        `NotFoundError` if none is left.
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
                if self._is_first:
                    self._catalog.mark_corrupted(record.checkpoint_id, str(error))
                continue
            seconds = time.perf_counter() - started
            self._measure_restore(record, seconds)
            return Restored(record, result, seconds, tuple(damaged))

    def compact(self, checkpoint_id: str) -> CheckpointRecord:
        """Rewrite the end of a chain so that it stands alone; on rank 0."""
        return compact(self._catalog, self._store, checkpoint_id)

    def wait(self) -> None:
        """Wait for what goes on in the background, and raise the error of a save unless somebody has seen it.

        A compaction that failed has changed nothing and is logged.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.settle()
        thread, self._compaction = self._compaction, None
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """Wait for what goes on in the background; catalog and checkpoint stay open, they are the caller's."""
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _prepare(self) -> None:
        self.wait()
        if not self._is_swept:
            self.sweep()

    @property
    def _catalog(self) -> CheckpointManager:
        if self._manager is None:
            raise ConflictError(f"rank {self._coordinator.rank} has no catalog; rank 0 has")
        return self._manager

    def _agree(self, decide: Callable[[], _Decision]) -> _Decision:
        """Rank 0 decides, the others are told, its failures included."""
        if not self._is_first:
            return decode(
                json.loads(self._coordinator.broadcast(None, _AGREEMENT_SECONDS)), _Decision
            )
        try:
            decision = decide()
        except Exception as error:
            self._tell(_Decision(None, error=str(error)))
            raise
        self._tell(decision)
        return decision

    def _tell(self, decision: _Decision) -> None:
        self._coordinator.broadcast(json.dumps(encode(decision)).encode(), _AGREEMENT_SECONDS)

    def _begin(self, request: CreateCheckpointRequest, kind: CheckpointType | None) -> _Decision:
        parent = None
        if kind is not CheckpointType.FULL and self._increments is not None:
            parent = self._usable_parent(request, self._increments)
        if kind is CheckpointType.INCREMENTAL and parent is None:
            raise ConflictError(
                f"run {self.training_run_id!r} has nothing to build an incremental checkpoint on: "
                "increments are turned off, the chain is full, or there is no checkpoint yet"
            )
        if kind is not CheckpointType.EMERGENCY:
            kind = CheckpointType.FULL if parent is None else CheckpointType.INCREMENTAL
        asked = replace(
            request,
            checkpoint_type=kind,
            parent_id=None if parent is None else parent.checkpoint_id,
        )
        record = self._catalog.create(asked, note=owner_of_this_process())
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
                self._store, manifest, self._increments, self._memory
            )
        return replace(
            options,
            checkpoint_prefix=prefix_of(record.training_run_id, record.checkpoint_id),
            custom_metadata=described(record, options.custom_metadata),
            increment=self.last_increment,
        )

    def _give_up(self, record: CheckpointRecord, error: BaseException) -> None:
        if not self._is_first:
            return
        try:
            self._catalog.delete(record.checkpoint_id, reason=f"its save failed: {error}")
        except (
            TensorForgeError
        ) as problem:  # the save's own error matters more; a sweep comes later
            _LOG.warning("record %s remains for the sweep: %s", record.checkpoint_id, problem)

    def _finish(self, record: CheckpointRecord, seconds: float) -> CheckpointRecord:
        prefix = prefix_of(record.training_run_id, record.checkpoint_id)
        manifest = store_index.read_manifest(self._store, prefix)
        try:
            self._verify_own(manifest)
        except CheckpointError as error:
            self._catalog.delete(
                record.checkpoint_id, reason=f"damaged while it was saved: {error}"
            )
            raise
        size = stored_size(self._store, manifest)
        verified = self._catalog.now()
        done = self._catalog.complete(record.checkpoint_id, size, prefix, verified_at=verified)
        self._catalog.measurements.record_save(self.training_run_id, size, seconds)
        return done

    def _verify_own(self, manifest: CheckpointManifest) -> None:
        """Read back what this save wrote; what it refers to was verified when it was written."""
        CheckpointValidator(self._store, [EveryByteIsIntact(only_own=True)]).validate_manifest(
            manifest
        ).raise_if_invalid()

    def _choose(self, criteria: RestoreCriteria, damaged: list[str]) -> _Decision:
        record = self._catalog.find_restore_point(criteria)
        if record is None:
            tried = f"; damaged: {', '.join(damaged)}" if damaged else ""
            raise NotFoundError(
                f"run {criteria.training_run_id!r} has no checkpoint that could be restored{tried}"
            )
        return _Decision(record)

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
                _LOG.warning("checkpoint %s stays in its chain: %s", record.checkpoint_id, error)

        name = f"compact {record.checkpoint_id}"
        self._compaction = threading.Thread(target=work, name=name, daemon=True)
        self._compaction.start()


def _required(decision: _Decision) -> CheckpointRecord:
    if decision.record is None:
        raise CheckpointError(
            f"rank 0 could not go on: {decision.error}", "", CheckpointErrorType.UNKNOWN
        )
    if decision.record.state is CheckpointState.DELETED:
        raise ConflictError(f"checkpoint {decision.record.checkpoint_id!r} was deleted meanwhile")
    return decision.record
