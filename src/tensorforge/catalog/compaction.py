"""Rewriting the end of a chain so that it stands alone. Works on bytes; starts without torch.

<prefix>.compacting.json    somebody is at it, or crashed while doing so
"""

from __future__ import annotations

import itertools
from datetime import datetime

import msgspec

from tensorforge.catalog.chains.records import CheckpointRecord, CheckpointState
from tensorforge.catalog.incremental_store import owner_has_ended, owner_of_this_process
from tensorforge.catalog.manager import CheckpointManager
from tensorforge.checkpoint import store_index
from tensorforge.checkpoint.format.manifest import (
    CheckpointManifest,
    ChunkMetadata,
    FileEntry,
    StoredBytes,
    TensorMetadata,
    check_manifest,
    checksum,
    encode_manifest,
)
from tensorforge.checkpoint.load.chunks import StoredChunks
from tensorforge.errors import AlreadyExistsError, CheckpointError, ConflictError, NotFoundError
from tensorforge.storage.blobs import BlobStore, BlobWriter

COMPACTING = ".compacting.json"


def compact(manager: CheckpointManager, store: BlobStore, checkpoint_id: str) -> CheckpointRecord:
    """Make a checkpoint independent of those below it; what it holds stays the same, bit for bit.

    Only the end of a chain can be compacted: others would still refer to the files below. If one is added
    meanwhile, or the checkpoint is gone by then, this is a `ConflictError` and changes nothing.
    """
    record = manager.get(checkpoint_id)
    if record is None:
        raise NotFoundError(f"the catalog has no checkpoint {checkpoint_id!r}")
    if record.state is not CheckpointState.COMPLETE:
        raise ConflictError(f"checkpoint {checkpoint_id!r} is {record.state.value}")
    if record.is_self_contained:
        return record
    claim = f"{record.storage_path}{COMPACTING}"
    try:
        store.create(claim, owner_of_this_process().encode())
    except AlreadyExistsError as error:
        raise ConflictError(f"checkpoint {checkpoint_id!r} is being compacted already") from error
    try:
        return _compact(manager, store, record)
    finally:
        _tidy(store, record.storage_path)


def _compact(
    manager: CheckpointManager, store: BlobStore, record: CheckpointRecord
) -> CheckpointRecord:
    new = _rewritten(store, store_index.read_manifest(store, record.storage_path))
    document = encode_manifest(new)
    return manager.replace_chain(
        record.checkpoint_id,
        new.size_bytes + len(document),
        commit=lambda: store.write(new.key, document),
    )


def _tidy(store: BlobStore, prefix: str) -> None:
    """Remove the files that the manifest, the old or the new one, does not name, and then the claim."""
    try:
        named = store_index.read_manifest(store, prefix).own_keys()
    except CheckpointError:
        named = []  # the checkpoint was deleted meanwhile
    for key in store_index.leftover_keys(store, prefix):
        if key not in named:
            store.delete(key)
    store.delete(f"{prefix}{COMPACTING}")


def sweep_compactions(store: BlobStore, now: datetime) -> None:
    """Clean up after processes that ended while they compacted."""
    for blob in list(store.list()):
        if blob.key.endswith(COMPACTING):
            try:
                owner = store.read(blob.key).decode(errors="replace")
            except NotFoundError:
                continue
            if owner_has_ended(owner, blob.modified_at, now):
                _tidy(store, blob.key.removesuffix(COMPACTING))


def _rewritten(store: BlobStore, old: CheckpointManifest) -> CheckpointManifest:
    """Write one file with all content of a checkpoint, and make the manifest that goes with it."""
    names = (f"{old.prefix}/full-{n:05}-of-{n:05}.frames" for n in itertools.count(1))
    key = next(name for name in names if name not in old.own_keys())
    source = StoredChunks(store, old)
    with store.open_writer(key, sum(tensor.nbytes for tensor in old.tensors.values())) as writer:
        file = _WholeChunks(writer, source)
        tensors = {name: file.take(name, tensor) for name, tensor in old.tensors.items()}
        if file.size:
            writer.commit()
    new = msgspec.structs.replace(
        old, files=(FileEntry(key, file.size),) if file.size else (), tensors=tensors, parent=None
    )
    check_manifest(new)
    return new


class _WholeChunks:
    """A file that takes the verified content of chunks, one after the other."""

    def __init__(self, writer: BlobWriter, source: StoredChunks) -> None:
        self._writer = writer
        self._source = source
        self._taken: dict[TensorMetadata, TensorMetadata] = {}
        self.size = 0

    def take(self, name: str, tensor: TensorMetadata) -> TensorMetadata:
        """Where the tensor lies now; one that is tied to another is not written again."""
        if tensor not in self._taken:
            self._taken[tensor] = self._write(name, tensor)
        return self._taken[tensor]

    def _write(self, name: str, tensor: TensorMetadata) -> TensorMetadata:
        chunks = tuple(self._chunk(name, tensor, chunk) for chunk in tensor.chunks)
        return msgspec.structs.replace(tensor, chunks=chunks)

    def _chunk(self, name: str, tensor: TensorMetadata, chunk: ChunkMetadata) -> ChunkMetadata:
        stored = memoryview(bytearray(chunk.data.length))
        self._source.read_range(chunk.data.file, chunk.data.start, stored)
        content = self._source.decode(name, tensor, chunk, stored)
        self._writer.append(content)
        data = StoredBytes(0, self.size, len(content), checksum(content))
        self.size += len(content)
        return msgspec.structs.replace(chunk, data=data)
