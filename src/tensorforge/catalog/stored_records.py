"""The relation of catalog and store: where the files of a record are, and the record inside a manifest.

The prefix of a checkpoint is `<run>/<checkpoint id>`, and its manifest contains the entire record, so that the
catalog can be rebuilt from manifests alone. The first versions of training named their checkpoints
`step-<step>-g<generation>-<hex>` and kept the record in the database only. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote, unquote

from tensorforge.catalog.chains.records import CheckpointRecord, CheckpointState, CheckpointType
from tensorforge.checkpoint import store_index
from tensorforge.checkpoint.format.manifest import CheckpointManifest
from tensorforge.encoding import decode, encode
from tensorforge.errors import EncodingError
from tensorforge.processes import ProcessIdentity
from tensorforge.storage.blobs import BlobStore

METADATA = "tensorforge.catalog"
"""The key of a manifest's custom metadata that contains the record."""

OLD_BOOKKEEPING = "tensorforge_run"
"""The key of a manifest's custom metadata with the bookkeeping of a run, as the first versions saved it."""

_OLD_PREFIX = re.compile(r"step-(\d{8,18})-g\d+-[0-9a-f]{6}")
_SAFE = "-_.~ "
_LONGEST_SAVE = timedelta(days=1)


def prefix_of(training_run_id: str, checkpoint_id: str) -> str:
    """The prefix of a checkpoint. The run id may have any characters; it becomes one part of a key."""
    run = quote(training_run_id, safe=_SAFE)
    return f"{'%2E' * len(run) if set(run) <= {'.'} else run}/{checkpoint_id}"


def run_and_id_of(prefix: str) -> tuple[str, str] | None:
    """The inverse of `prefix_of`; `None` for a prefix of another form."""
    run, _, checkpoint_id = prefix.rpartition("/")
    name = unquote(run)
    return (name, checkpoint_id) if name and prefix_of(name, checkpoint_id) == prefix else None


def with_record(metadata: Mapping[str, Any], record: CheckpointRecord) -> dict[str, Any]:
    """The custom metadata of a manifest: the caller's, and the record."""
    return {**metadata, METADATA: encode(record)}


def record_in(
    manifest: CheckpointManifest, size_bytes: int, *, old_run: str = "default"
) -> CheckpointRecord | None:
    """The record in a manifest, as a complete one; `None` if no catalog was used for the save.

    A manifest of the first versions of training has no record: it gets one of the run `old_run`, with the
    prefix as id.
    """
    metadata = manifest.custom_metadata
    if not isinstance(metadata, dict):
        return None
    if METADATA not in metadata:
        return _old_record(manifest, size_bytes, old_run) if OLD_BOOKKEEPING in metadata else None
    try:
        record = decode(metadata[METADATA], CheckpointRecord)
    except EncodingError:
        return None
    if prefix_of(record.training_run_id, record.checkpoint_id) != manifest.prefix:
        return None
    parent = run_and_id_of(manifest.parent) if manifest.parent else None
    kind = record.checkpoint_type
    if parent is None and kind is CheckpointType.INCREMENTAL:
        kind = CheckpointType.FULL  # a compaction has made it self-contained
    return replace(
        record,
        checkpoint_type=kind,
        state=CheckpointState.COMPLETE,
        size_bytes=size_bytes,
        parent_id=None if parent is None else parent[1],
        storage_path=manifest.prefix,
        note="",
    )


def _old_record(manifest: CheckpointManifest, size_bytes: int, run: str) -> CheckpointRecord | None:
    named = _OLD_PREFIX.fullmatch(manifest.prefix)
    if named is None:
        return None
    return CheckpointRecord(
        checkpoint_id=manifest.prefix,
        training_run_id=run,
        epoch=0,
        step=int(named[1]),
        checkpoint_type=CheckpointType.FULL,
        state=CheckpointState.COMPLETE,
        created_at=manifest.created_at,
        size_bytes=size_bytes,
        storage_path=manifest.prefix,
    )


def stored_size(store: BlobStore, manifest: CheckpointManifest) -> int:
    """The bytes that a checkpoint occupies: its own files and its manifest."""
    return manifest.size_bytes + store.stat(manifest.key).size


def remover(store: BlobStore) -> Callable[[CheckpointRecord], None]:
    """The function that deletes a checkpoint's files from `store`, for `CheckpointManager`."""

    def remove(record: CheckpointRecord) -> None:
        prefix = record.storage_path or prefix_of(record.training_run_id, record.checkpoint_id)
        store_index.delete_files(store, prefix)

    return remove


def writer_has_ended(process: ProcessIdentity | None, since: datetime, now: datetime) -> bool:
    """Whether the process that has been saving or compacting a checkpoint since a time no longer does so.

    A process that cannot be seen from here (unknown, on another host, in another container) counts as ended
    after a day.
    """
    if process is not None and process.is_running():
        return False
    return (process is not None and process.has_ended()) or now - since > _LONGEST_SAVE
