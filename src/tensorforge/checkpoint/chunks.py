"""Getting verified bytes out of a checkpoint's files. Starts without torch.

Whoever stores chunks in another way (differences, content-addressed files) needs a codec, not another reader:
the manifest says where the bytes of a chunk lie, how they are encoded, and what they were taken from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from tensorforge.checkpoint.codecs import codec_named
from tensorforge.checkpoint.dtypes import ITEM_SIZES
from tensorforge.checkpoint.manifest import (
    RAW,
    CheckpointManifest,
    ChunkMetadata,
    FileEntry,
    StoredBytes,
    TensorMetadata,
    checksum,
    corrupted,
)
from tensorforge.errors import EncodingError, NotFoundError
from tensorforge.resilience import RetryPolicy
from tensorforge.storage.blobs import BlobStore

Result = TypeVar("Result")


class ChunkSource(Protocol):
    """Where a reader gets chunks from."""

    @property
    def manifest(self) -> CheckpointManifest:
        """The checkpoint's manifest."""

    def read_range(self, file: int, start: int, into: memoryview) -> None:
        """Fill a buffer with bytes of a file, as they are stored."""

    def read_raw(self, name: str, stored: StoredBytes, into: memoryview) -> None:
        """Fill a buffer with a chunk that is stored as it is, and verify it."""

    def decode(
        self, name: str, tensor: TensorMetadata, chunk: ChunkMetadata, stored: memoryview
    ) -> memoryview:
        """Verify a chunk's stored bytes and decode them."""


class StoredChunks:
    """The chunks of one checkpoint in a store."""

    def __init__(
        self, store: BlobStore, manifest: CheckpointManifest, retry: RetryPolicy | None = None
    ) -> None:
        self._store = store
        self._retry = retry or RetryPolicy()
        self._manifest = manifest

    @property
    def manifest(self) -> CheckpointManifest:
        """The checkpoint's manifest."""
        return self._manifest

    def read_range(self, file: int, start: int, into: memoryview) -> None:
        """Fill a buffer with bytes of a file, as they are stored."""
        key = self._manifest.files[file].key
        self._reading(key, lambda: self._store.read_into(key, start, into))

    def read_raw(self, name: str, stored: StoredBytes, into: memoryview) -> None:
        """Fill a buffer with a chunk that is stored as it is, and verify it."""
        self.read_range(stored.file, stored.start, into)
        self.check(name, stored, into)

    def decode(
        self, name: str, tensor: TensorMetadata, chunk: ChunkMetadata, stored: memoryview
    ) -> memoryview:
        """Verify a chunk's stored bytes and decode them."""
        self.check(name, chunk.data, stored)
        if chunk.data.codec == RAW:
            return stored
        size = chunk.box.size * ITEM_SIZES[tensor.dtype]
        return self._decode(name, tensor, chunk.data, stored, size)

    def _decode(
        self,
        name: str,
        tensor: TensorMetadata,
        data: StoredBytes,
        stored: memoryview,
        size: int,
    ) -> memoryview:
        key = self._manifest.files[data.file].key
        content = memoryview(bytearray(size))
        try:
            codec = codec_named(data.codec)
            base = self._base(name, tensor, data, size) if codec.needs_base else None
            codec.decode(stored, content, ITEM_SIZES[tensor.dtype], base)
        except EncodingError as error:
            raise corrupted(f"{key}, tensor {name!r}: {error}", key) from error
        if checksum(content) != data.digest:
            raise corrupted(f"{key}, tensor {name!r}: the decoded bytes do not match", key)
        return content

    def _base(self, name: str, tensor: TensorMetadata, data: StoredBytes, size: int) -> memoryview:
        base = data.base
        if base is None:
            raise EncodingError(f"codec {data.codec} needs something to start from")
        stored = memoryview(bytearray(base.length))
        self.read_raw(name, base, stored)
        if base.codec == RAW:
            return stored
        return self._decode(name, tensor, base, stored, size)

    def check(self, name: str, stored: StoredBytes, content: memoryview) -> None:
        """Raise `CheckpointError` unless stored bytes are the ones that were written."""
        if checksum(content) != stored.checksum:
            key = self._manifest.files[stored.file].key
            raise corrupted(
                f"{key} is damaged: tensor {name!r}, bytes {stored.start} to "
                f"{stored.start + stored.length}, have another checksum than when they were written",
                key,
            )

    def check_file(self, file: FileEntry) -> None:
        """Raise `CheckpointError` unless a file has its size and its header is intact."""
        info = self._reading(file.key, lambda: self._store.stat(file.key))
        if info.size != file.size:
            raise corrupted(f"{file.key} has {info.size} bytes instead of {file.size}", file.key)
        if file.header:
            header = memoryview(bytearray(file.header))
            self._reading(file.key, lambda: self._store.read_into(file.key, 0, header))
            if checksum(header) != file.header_checksum:
                raise corrupted(f"{file.key} is damaged: its header has changed", file.key)

    def _reading(self, key: str, operation: Callable[[], Result]) -> Result:
        try:
            return self._retry.run(operation)
        except (NotFoundError, EncodingError) as error:
            raise corrupted(f"{key} is missing or cut short: {error}", key) from error


def verify_chunk(
    source: StoredChunks, name: str, tensor: TensorMetadata, chunk: ChunkMetadata, room: memoryview
) -> None:
    """Read a chunk and prove it: the stored bytes, and what they decode to."""
    stored = room[: chunk.data.length] if chunk.data.length <= len(room) else None
    buffer = stored if stored is not None else memoryview(bytearray(chunk.data.length))
    source.read_range(chunk.data.file, chunk.data.start, buffer)
    source.decode(name, tensor, chunk, buffer)
