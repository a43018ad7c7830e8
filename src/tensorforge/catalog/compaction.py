"""Compaction: rewrites the last checkpoint of a chain so that it is self-contained. Imports no torch.

<prefix>.compacting.json    marks a compaction that is running or has crashed; names its process
"""

from __future__ import annotations

import itertools
from datetime import datetime

import msgspec

from tensorforge.catalog.chains.records import CheckpointRecord
from tensorforge.catalog.manager import CheckpointManager
from tensorforge.catalog.stored_records import writer_has_ended
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
from tensorforge.checkpoint.load.stored_chunks import StoredChunks, read_chunk
from tensorforge.errors import AlreadyExistsError, CheckpointError, ConflictError, NotFoundError
from tensorforge.processes import ProcessIdentity
from tensorforge.storage.blobs import BlobStore, BlobWriter

COMPACTING = ".compacting.json"


def compact(manager: CheckpointManager, store: BlobStore, checkpoint_id: str) -> CheckpointRecord:
    """Make a checkpoint independent of its ancestors; its content stays the same, bit for bit.

    Only the last checkpoint of a chain can be compacted, because others refer to the old files. If another one
    is added to the chain in the meantime, or the checkpoint is deleted, this raises `ConflictError` and changes
    nothing.
    """
    record = manager.require_complete(checkpoint_id, "compacted")
    if record.is_self_contained:
        return record
    claim = f"{record.storage_path}{COMPACTING}"
    try:
        store.create(claim, ProcessIdentity.current().to_text().encode())
    except AlreadyExistsError as error:
        raise ConflictError(
            f"checkpoint {checkpoint_id!r} is being compacted by another process"
        ) from error
    try:
        return _compact(manager, store, record)
    finally:
        _clean_up(store, record.storage_path)


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


def _clean_up(store: BlobStore, prefix: str) -> None:
    """Delete the files that the current manifest does not list, and then the mark of the compaction."""
    try:
        named = store_index.read_manifest(store, prefix).own_keys()
    except CheckpointError:
        named = []  # the checkpoint was deleted in the meantime
    for key in store_index.data_keys(store, prefix):
        if key not in named:
            store.delete(key)
    store.delete(f"{prefix}{COMPACTING}")


def sweep_compactions(store: BlobStore, now: datetime) -> None:
    """Clean up after processes that ended during a compaction."""
    for blob in list(store.list()):
        if blob.key.endswith(COMPACTING):
            try:
                text = store.read(blob.key).decode(errors="replace")
            except NotFoundError:
                continue
            if writer_has_ended(ProcessIdentity.from_text(text), blob.modified_at, now):
                _clean_up(store, blob.key.removesuffix(COMPACTING))


def _rewritten(store: BlobStore, old: CheckpointManifest) -> CheckpointManifest:
    """Write one file with all chunks of a checkpoint, and return the manifest that refers to it."""
    names = (f"{old.prefix}/full-{n:05}-of-{n:05}.frames" for n in itertools.count(1))
    key = next(name for name in names if name not in old.own_keys())
    source = StoredChunks(store, old)
    with store.open_writer(key, sum(tensor.nbytes for tensor in old.tensors.values())) as writer:
        file = _RawFile(writer, source)
        tensors = {name: file.append(name, tensor) for name, tensor in old.tensors.items()}
        if file.size:
            writer.commit()
    new = msgspec.structs.replace(
        old, files=(FileEntry(key, file.size),) if file.size else (), tensors=tensors, parent=None
    )
    check_manifest(new)
    return new


class _RawFile:
    """A new file with the verified, decoded content of chunks."""

    def __init__(self, writer: BlobWriter, source: StoredChunks) -> None:
        self._writer = writer
        self._source = source
        self._written: dict[TensorMetadata, TensorMetadata] = {}
        self.size = 0

    def append(self, name: str, tensor: TensorMetadata) -> TensorMetadata:
        """Write the chunks of a tensor, and return it with their new places. Tied tensors are written once."""
        if tensor not in self._written:
            chunks = tuple(self._append_chunk(name, tensor, chunk) for chunk in tensor.chunks)
            self._written[tensor] = msgspec.structs.replace(tensor, chunks=chunks)
        return self._written[tensor]

    def _append_chunk(
        self, name: str, tensor: TensorMetadata, chunk: ChunkMetadata
    ) -> ChunkMetadata:
        content = read_chunk(self._source, name, tensor, chunk)
        self._writer.append(content)
        data = StoredBytes(0, self.size, len(content), checksum(content))
        self.size += len(content)
        return msgspec.structs.replace(chunk, data=data)
