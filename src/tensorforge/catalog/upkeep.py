"""Keeps catalog and store consistent: after a crash, after damage, after the loss of the database.

If catalog and manifests disagree, the manifests are right. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from tensorforge.catalog.chains.records import CheckpointRecord, CheckpointState, CheckpointType
from tensorforge.catalog.compaction import sweep_compactions
from tensorforge.catalog.manager import CheckpointManager
from tensorforge.catalog.stored_records import (
    prefix_of,
    record_in,
    run_and_id_of,
    stored_size,
    writer_has_ended,
)
from tensorforge.checkpoint import store_index
from tensorforge.checkpoint.options import Progress
from tensorforge.checkpoint.validator import (
    CheckpointValidator,
    EveryByteIsIntact,
    ValidationReport,
)
from tensorforge.errors import AlreadyExistsError, CheckpointError, ConflictError
from tensorforge.processes import ProcessIdentity
from tensorforge.storage.blobs import BlobInfo, BlobStore


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep did with the records of crashed saves: the ids that it completed and those it deleted."""

    completed: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What a rebuild found: ids added, ids added as corrupted, prefixes of manifests without a record.

    `recovered`: the ids of checkpoints that the catalog had as corrupted and whose bytes are all intact.
    """

    adopted: tuple[str, ...] = ()
    corrupted: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    recovered: tuple[str, ...] = ()


def sweep(
    manager: CheckpointManager,
    store: BlobStore,
    now: datetime | None = None,
    training_run_id: str | None = None,
) -> SweepReport:
    """Complete or delete the records of saves whose process has ended, in one run or in all.

    A save whose manifest was committed is completed. The record and the files of any other are deleted.
    """
    moment = now or datetime.now(UTC)
    store_index.sweep(store, moment)
    sweep_compactions(store, moment)
    manager.remove_deleted_files(training_run_id)
    runs = [run.training_run_id for run in manager.list_runs()]
    completed: list[str] = []
    deleted: list[str] = []
    for run in runs if training_run_id is None else [training_run_id]:
        for record in manager.list_for_run(run):
            if _is_crashed_save(record, moment):
                settled = _settle(manager, store, record)
                (completed if settled else deleted).append(record.checkpoint_id)
    return SweepReport(tuple(completed), tuple(deleted))


def _is_crashed_save(record: CheckpointRecord, now: datetime) -> bool:
    """Whether the process in the note of a record that is being created has ended."""
    process = ProcessIdentity.from_text(record.note)
    if record.state is not CheckpointState.CREATING or process is None:
        return False
    return writer_has_ended(process, record.created_at, now)


def _settle(manager: CheckpointManager, store: BlobStore, record: CheckpointRecord) -> bool:
    prefix = prefix_of(record.training_run_id, record.checkpoint_id)
    try:
        manifest = store_index.read_manifest(store, prefix)
        CheckpointValidator(store).validate_manifest(manifest).raise_if_invalid()
        manager.complete(record.checkpoint_id, stored_size(store, manifest), prefix)
    except (CheckpointError, ConflictError):
        reason = "its process ended during the save"
        manager.delete(record.checkpoint_id, cascade=True, reason=reason)
        return False
    return True


def verify(
    manager: CheckpointManager,
    store: BlobStore,
    checkpoint_id: str,
    progress: Progress | None = None,
) -> ValidationReport:
    """Read every byte of a complete checkpoint and of its chain, and record the outcome in the catalog.

    An intact checkpoint is marked as verified. A damaged one is marked as corrupted, and so are those that
    build on it.
    """
    record = manager.require_complete(checkpoint_id, "verified")
    report = CheckpointValidator(store, [EveryByteIsIntact(progress)]).validate(record.storage_path)
    if report.is_valid:
        manager.mark_verified(checkpoint_id)
    else:
        manager.mark_corrupted(checkpoint_id, report.errors[0].message)
    return report


def rebuild(
    manager: CheckpointManager, store: BlobStore, *, old_run: str = "default"
) -> RebuildReport:
    """Add every checkpoint of a store that the catalog does not know, from the manifests alone.

    A checkpoint whose manifest cannot be read, or whose files are missing, is added as corrupted. One that the
    catalog has as corrupted is read again, and is complete if every byte is intact. `old_run` is the run of
    checkpoints whose manifests name none; see `stored_records`.
    """
    adopted: list[str] = []
    corrupted: list[str] = []
    foreign: list[str] = []
    recovered: list[str] = []
    known = _by_prefix(manager)
    for prefix, blob in store_index.manifest_blobs(store):
        if prefix in known:
            if _recover(manager, store, known[prefix]):
                recovered.append(known[prefix].checkpoint_id)
            continue
        record = _record_at(store, blob, prefix, old_run)
        if record is None:
            foreign.append(prefix)
            continue
        try:
            manager.adopt(record)
        except AlreadyExistsError:
            continue
        intact = record.state is CheckpointState.COMPLETE
        (adopted if intact else corrupted).append(record.checkpoint_id)
    return RebuildReport(tuple(adopted), tuple(corrupted), tuple(foreign), tuple(recovered))


def _by_prefix(manager: CheckpointManager) -> dict[str, CheckpointRecord]:
    records = (
        record
        for run in manager.list_runs()
        for record in manager.list_for_run(run.training_run_id)
    )
    return {record.storage_path: record for record in records if record.storage_path}


def _recover(manager: CheckpointManager, store: BlobStore, record: CheckpointRecord) -> bool:
    """Whether a record was corrupted without reason; it is complete then."""
    if record.state is not CheckpointState.CORRUPTED:
        return False
    validator = CheckpointValidator(store, [EveryByteIsIntact()])
    if not validator.validate(record.storage_path).is_valid:
        return False
    verified = manager.now()
    manager.adopt(replace(record, state=CheckpointState.COMPLETE, note="", verified_at=verified))
    return True


def without_record(manager: CheckpointManager, store: BlobStore) -> tuple[str, ...]:
    """The prefixes in a store that no record of the catalog names; `rebuild` adds them."""
    known = _by_prefix(manager)
    return tuple(prefix for prefix, _ in store_index.manifest_blobs(store) if prefix not in known)


def _record_at(
    store: BlobStore, blob: BlobInfo, prefix: str, old_run: str
) -> CheckpointRecord | None:
    try:
        manifest = store_index.read_manifest(store, prefix)
    except CheckpointError as error:
        return _unreadable(blob, prefix, str(error))
    record = record_in(manifest, manifest.size_bytes + blob.size, old_run=old_run)
    if record is None:
        return None
    report = CheckpointValidator(store).validate_manifest(manifest)
    if report.is_valid:
        return record
    return replace(record, state=CheckpointState.CORRUPTED, note=report.errors[0].message)


def _unreadable(blob: BlobInfo, prefix: str, reason: str) -> CheckpointRecord | None:
    names = run_and_id_of(prefix)
    if names is None:
        return None
    return CheckpointRecord(
        checkpoint_id=names[1],
        training_run_id=names[0],
        epoch=0,
        step=0,
        checkpoint_type=CheckpointType.FULL,
        state=CheckpointState.CORRUPTED,
        created_at=blob.modified_at,
        size_bytes=blob.size,
        storage_path=prefix,
        note=reason,
    )
