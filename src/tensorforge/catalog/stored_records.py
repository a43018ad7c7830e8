"""The relation of catalog and store: where the files of a record are, and the record inside a manifest.

The prefix of a checkpoint is `<run>/<checkpoint id>`, and its manifest contains the entire record, so that the
catalog can be rebuilt from manifests alone. Imports no torch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import psutil

from tensorforge.catalog.chains.records import CheckpointRecord, CheckpointState, CheckpointType
from tensorforge.checkpoint import store_index
from tensorforge.checkpoint.format.manifest import CheckpointManifest
from tensorforge.encoding import decode, encode
from tensorforge.errors import EncodingError
from tensorforge.storage.blobs import BlobStore
from tensorforge.typed_json import decode_typed

METADATA = "tensorforge.catalog"
"""The key of a manifest's custom metadata that contains the record."""

_SAFE = "-_.~ "


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


def record_in(manifest: CheckpointManifest, size_bytes: int) -> CheckpointRecord | None:
    """The record in a manifest, as a complete one; `None` if no catalog was used for the save."""
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


def stored_size(store: BlobStore, manifest: CheckpointManifest) -> int:
    """The bytes that a checkpoint occupies: its own files and its manifest."""
    return manifest.size_bytes + store.stat(manifest.key).size


def remover(store: BlobStore) -> Callable[[CheckpointRecord], None]:
    """The function that deletes a checkpoint's files from `store`, for `CheckpointManager`."""

    def remove(record: CheckpointRecord) -> None:
        prefix = record.storage_path or prefix_of(record.training_run_id, record.checkpoint_id)
        store_index.delete_files(store, prefix)

    return remove


class WritingProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The process that saves or compacts a checkpoint, so that others can find out whether it has ended.

    Its JSON is the note of a record in state `CREATING`, and the content of a `.compacting.json` file.
    """

    host: str
    pid: int
    started: float

    @classmethod
    def current(cls) -> WritingProcess:
        """The calling process."""
        started = psutil.Process().create_time()
        return cls(host=socket.gethostname(), pid=os.getpid(), started=started)

    def to_json(self) -> str:
        """The process as JSON."""
        return msgspec.json.encode(self).decode()

    def has_ended(self) -> bool:
        """Whether the process has certainly ended; `False` if it runs or is on another host."""
        if self.host != socket.gethostname():
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) > 1
        except psutil.NoSuchProcess:
            return True


def writer_has_ended(text: str | bytes) -> bool:
    """Whether `text` is the JSON of a `WritingProcess` that has ended; `False` for any other text."""
    try:
        return decode_typed(text, WritingProcess).has_ended()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
