"""Keeping catalog and store in step: after a crash, after damage, after the loss of the database.

What is true is what the manifests say. Starts without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from tensorforge.catalog.chains.records import CheckpointRecord, CheckpointState, CheckpointType
from tensorforge.catalog.compaction import sweep_compactions
from tensorforge.catalog.incremental_store import (
    owner_has_ended,
    prefix_of,
    record_in,
    run_and_id_of,
    stored_size,
)
from tensorforge.catalog.manager import CheckpointManager
from tensorforge.checkpoint import store_index
from tensorforge.checkpoint.format.manifest import SUFFIX, CheckpointManifest
from tensorforge.checkpoint.options import Progress
from tensorforge.checkpoint.validator import (
    CheckpointValidator,
    EveryByteIsIntact,
    ValidationReport,
)
from tensorforge.errors import AlreadyExistsError, CheckpointError, ConflictError, NotFoundError
from tensorforge.storage.blobs import BlobInfo, BlobStore


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What was done about saves that never ended: ids that were completed after all, or deleted."""

    completed: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What a rebuild found: ids entered, ids entered as corrupted, prefixes that tell of no record."""

    adopted: tuple[str, ...] = ()
    corrupted: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


def sweep(
    manager: CheckpointManager,
    store: BlobStore,
    now: datetime | None = None,
    training_run_id: str | None = None,
) -> SweepReport:
    """Settle the records of saves whose process ended in between, in one run or in all.

    If the manifest was committed, so is the checkpoint. If not, record and files go.
    """
    moment = now or datetime.now(UTC)
    store_index.sweep(store, moment)
    sweep_compactions(store, moment)
    manager.remove_deleted_files()
    runs = [run.training_run_id for run in manager.list_runs()]
    completed: list[str] = []
    deleted: list[str] = []
    for run in runs if training_run_id is None else [training_run_id]:
        for record in manager.list_for_run(run):
            if record.state is CheckpointState.CREATING and owner_has_ended(
                record.note, record.created_at, moment
            ):
                settled = _settle(manager, store, record)
                (completed if settled else deleted).append(record.checkpoint_id)
    return SweepReport(tuple(completed), tuple(deleted))


def _settle(manager: CheckpointManager, store: BlobStore, record: CheckpointRecord) -> bool:
    prefix = prefix_of(record.training_run_id, record.checkpoint_id)
    try:
        manifest = store_index.read_manifest(store, prefix)
        CheckpointValidator(store).validate_manifest(manifest).raise_if_invalid()
        manager.complete(record.checkpoint_id, stored_size(store, manifest), prefix)
    except (CheckpointError, ConflictError):
        reason = "its save ended in between"
        manager.delete(record.checkpoint_id, cascade=True, reason=reason)
        return False
    return True


def verify(
    manager: CheckpointManager,
    store: BlobStore,
    checkpoint_id: str,
    progress: Progress | None = None,
) -> ValidationReport:
    """Read every byte of a complete checkpoint, those of its chain included, and remember the outcome.

    An intact one is verified from now on; a damaged one is corrupted, and those that build on it with it.
    """
    record = manager.get(checkpoint_id)
    if record is None:
        raise NotFoundError(f"the catalog has no checkpoint {checkpoint_id!r}")
    if record.state is not CheckpointState.COMPLETE:
        raise ConflictError(
            f"checkpoint {checkpoint_id!r} is {record.state.value}; only a complete one can be verified"
        )
    report = CheckpointValidator(store, [EveryByteIsIntact(progress)]).validate(record.storage_path)
    if report.is_valid:
        manager.mark_verified(checkpoint_id)
    else:
        manager.mark_corrupted(checkpoint_id, report.errors[0].message)
    return report


def rebuild(manager: CheckpointManager, store: BlobStore) -> RebuildReport:
    """Enter every checkpoint of a store that the catalog does not know, from the manifests alone.

    A manifest that cannot be read, or whose files are not there, is entered as corrupted.
    """
    adopted: list[str] = []
    corrupted: list[str] = []
    foreign: list[str] = []
    for blob in store.list():
        if not blob.key.endswith(SUFFIX):
            continue
        prefix = blob.key.removesuffix(SUFFIX)
        record = _record_at(store, blob, prefix)
        if record is None:
            foreign.append(prefix)
            continue
        try:
            manager.adopt(record)
        except AlreadyExistsError:
            continue
        intact = record.state is CheckpointState.COMPLETE
        (adopted if intact else corrupted).append(record.checkpoint_id)
    return RebuildReport(tuple(adopted), tuple(corrupted), tuple(foreign))


def _record_at(store: BlobStore, blob: BlobInfo, prefix: str) -> CheckpointRecord | None:
    try:
        manifest = store_index.read_manifest(store, prefix)
    except CheckpointError as error:
        return _unreadable(blob, prefix, str(error))
    record = record_in(manifest, manifest.size_bytes + blob.size)
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


def orphans(store: BlobStore) -> list[str]:
    """Keys in a store that belong to no checkpoint and to no save or deletion that is going on."""
    manifests = {manifest.prefix: manifest for manifest in store_index.manifests(store)}
    own = {key for manifest in manifests.values() for key in _keys_of(manifest)}
    return [blob.key for blob in store.list() if blob.key not in own]


def _keys_of(manifest: CheckpointManifest) -> list[str]:
    return [manifest.key, *manifest.own_keys()]
