"""How catalog and store belong together: where a record's files lie, and the record inside a manifest.

A checkpoint's prefix is `<run>/<checkpoint id>`, and its manifest carries the whole record, so that the
catalog can be made again from manifests alone. Starts without torch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote, unquote

import psutil

from tensorforge.catalog.chains.records import CheckpointRecord, CheckpointState, CheckpointType
from tensorforge.checkpoint import store_index
from tensorforge.checkpoint.format.manifest import CheckpointManifest
from tensorforge.encoding import decode, encode
from tensorforge.errors import EncodingError
from tensorforge.storage.blobs import BlobStore

METADATA = "tensorforge.catalog"
"""The key of a manifest's custom metadata under which its record stands."""

_SAFE = "-_.~ "


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
    """Who is saving: enough to find out later whether that process still lives."""
    started = psutil.Process().create_time()
    return f"saved by process {os.getpid()} of {socket.gethostname()}, started {started:.2f}"


def owner_is_gone(note: str) -> bool:
    """Whether the process that a note names is known to have ended."""
    words = note.replace(",", "").split()
    if len(words) != 8 or words[:3] != ["saved", "by", "process"]:
        return False
    pid, host, started = words[3], words[5], words[7]
    if host != socket.gethostname():
        return False
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(started)) > 1
    except psutil.NoSuchProcess:
        return True
