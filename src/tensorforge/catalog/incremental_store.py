"""How catalog and store belong together: where a record's files lie, and the record inside a manifest.

A checkpoint's prefix is `<run>/<checkpoint id>`, and its manifest carries the whole record, so that the
catalog can be made again from manifests alone. Starts without torch.
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
"""The key of a manifest's custom metadata under which its record stands."""

_SAFE = "-_.~ "
_LONGEST_SAVE = timedelta(days=1)
_OLD_NOTE = re.compile(
    r"saved by process (?P<pid>\d+) of (?P<host>\S+), started (?P<started>[\d.]+)"
)


def prefix_of(training_run_id: str, checkpoint_id: str) -> str:
    """The prefix of a checkpoint; a run's name may hold anything and still is one part of a key."""
    run = quote(training_run_id, safe=_SAFE)
    return f"{'%2E' * len(run) if set(run) <= {'.'} else run}/{checkpoint_id}"


def run_and_id_of(prefix: str) -> tuple[str, str] | None:
    """The inverse of `prefix_of`; `None` for a prefix of another form."""
    run, _, checkpoint_id = prefix.rpartition("/")
    name = unquote(run)
    return (name, checkpoint_id) if name and prefix_of(name, checkpoint_id) == prefix else None


def described(record: CheckpointRecord, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest's custom metadata: the caller's, and the record."""
    return {**metadata, METADATA: encode(record)}


def record_in(manifest: CheckpointManifest, size_bytes: int) -> CheckpointRecord | None:
    """The record that a manifest tells of; `None` if it was not saved through a catalog."""
    metadata = manifest.custom_metadata
    if not isinstance(metadata, dict) or METADATA not in metadata:
        return None
    try:
        record = decode(metadata[METADATA], CheckpointRecord)
    except EncodingError:
        return None
    if prefix_of(record.training_run_id, record.checkpoint_id) != manifest.prefix:
        return None
    parent = run_and_id_of(manifest.parent) if manifest.parent else None
    kind = record.checkpoint_type
    if parent is None and kind is CheckpointType.INCREMENTAL:
        kind = CheckpointType.FULL  # it was rewritten to stand alone
    return replace(
        record,
        checkpoint_type=kind,
        state=CheckpointState.COMPLETE,
        size_bytes=size_bytes,
        parent_id=None if parent is None else parent[1],
        storage_path=manifest.prefix,
        note="",
    )


def stored_size(store: BlobStore, manifest: CheckpointManifest) -> int:
    """Every byte that a checkpoint occupies: its own files and its manifest."""
    return manifest.size_bytes + store.stat(manifest.key).size


def remover(store: BlobStore) -> Callable[[CheckpointRecord], None]:
    """What removes a deleted checkpoint's files from a store; `CheckpointManager` takes it."""

    def remove(record: CheckpointRecord) -> None:
        prefix = record.storage_path or prefix_of(record.training_run_id, record.checkpoint_id)
        store_index.erase(store, prefix)

    return remove


def owner_of_this_process() -> str:
    """The process that is saving, for the note of a record or the content of a claim."""
    return ProcessIdentity.current().to_text()


def owner_has_ended(owner: str, since: datetime, now: datetime) -> bool:
    """Whether the process that `owner` names no longer saves; a text that names none says nothing.

    A process on another host or in another container cannot be seen; it counts as ended after a day.
    """
    process = ProcessIdentity.from_text(owner) or _process_in_old_note(owner)
    if process is None or process.is_running():
        return False
    return process.has_ended() or now - since > _LONGEST_SAVE


def _process_in_old_note(note: str) -> ProcessIdentity | None:
    """The process in the form that version 0.1.0 wrote down."""
    found = _OLD_NOTE.fullmatch(note)
    if found is None:
        return None
    process = ProcessIdentity.from_clock_time(int(found["pid"]), float(found["started"]))
    return replace(process, host=found["host"])
