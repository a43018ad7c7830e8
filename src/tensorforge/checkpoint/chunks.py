"""Getting verified bytes out of a checkpoint's files. Starts without torch.

Whoever stores chunks in another way (differences, content-addressed files) needs a codec, not another reader:
the manifest says where the bytes of a chunk lie, how they are encoded, and what they were taken from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    running_checksum,
)
from tensorforge.errors import EncodingError, NotFoundError
from tensorforge.resilience import RetryPolicy
from tensorforge.storage.blobs import BlobStore, PiecewiseBlobStore

Result = TypeVar("Result")

_HEADER_PART = 4 << 20


class ChunkSource(Protocol):
    """Where a reader gets chunks from."""

    @property
    def manifest(self) -> CheckpointManifest:
        """The checkpoint's manifest."""

    def is_at_hand(self, file: int) -> bool:
        """Whether reading a file is mere copying, without waiting for a disk or a network."""

    def read_range(self, file: int, start: int, into: memoryview) -> None:
        """Fill a buffer with bytes of a file, as they are stored."""

    def read_run(self, run: Sequence[tuple[str, StoredBytes]], into: memoryview) -> None:
        """Fill a buffer with named chunks that are stored as they are, one behind the other; verify each."""

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
        self._piecewise = store if isinstance(store, PiecewiseBlobStore) else None
        self._retry = retry or RetryPolicy()
        self._manifest = manifest

    @property
    def manifest(self) -> CheckpointManifest:
        """The checkpoint's manifest."""
        return self._manifest

    def is_at_hand(self, file: int) -> bool:
        """Whether reading a file is mere copying, without waiting for a disk or a network."""
        if self._piecewise is None:
            return False
        key = self._manifest.files[file].key
        return self._reading(key, functools.partial(self._piecewise.is_at_hand, key))

    def read_range(self, file: int, start: int, into: memoryview) -> None:
        """Fill a buffer with bytes of a file, as they are stored."""
        key = self._manifest.files[file].key
        self._reading(key, functools.partial(self._read, key, start, into))

    def read_run(self, run: Sequence[tuple[str, StoredBytes]], into: memoryview) -> None:
        """Fill a buffer with named chunks that are stored as they are, one behind the other; verify each."""
        first = run[0][1]
        key = self._manifest.files[first.file].key
        lengths = [stored.length for _, stored in run]
        found = self._reading(
            key, lambda: checksums_of(self._pieces(key, first.start, into), lengths)
        )
        for (name, stored), digest in zip(run, found, strict=True):
            self._compare(name, stored, digest)

    def _pieces(self, key: str, start: int, into: memoryview) -> Iterator[memoryview]:
        if self._piecewise is not None:
            return self._piecewise.read_pieces(key, start, into)
        self._store.read_into(key, start, into)
        return iter((into,))

    def decode(
        self, name: str, tensor: TensorMetadata, chunk: ChunkMetadata, stored: memoryview
    ) -> memoryview:
        """Verify a chunk's stored bytes and decode them."""
        self.check(name, chunk.data, stored)
        if chunk.data.codec == RAW:
            return stored
        key = self._manifest.files[chunk.data.file].key
        try:
            return self._follow(name, tensor, chunk, stored)
        except EncodingError as error:
            raise corrupted(f"{key}, tensor {name!r}: {error}", key) from error

    def _follow(
        self, name: str, tensor: TensorMetadata, chunk: ChunkMetadata, stored: memoryview
    ) -> memoryview:
        """Decode a chain of differences from its root on, so that only one link is in memory at a time."""
        item = ITEM_SIZES[tensor.dtype]
        content: memoryview | None = None
        for link in reversed(_chain(chunk.data)):
            held = stored if link is chunk.data else self._fetch(name, link)
            if link.codec == RAW:
                content = held
                continue
            decoded = memoryview(bytearray(chunk.box.size * item))
            codec_named(link.codec).decode(held, decoded, item, content)
            if checksum(decoded) != link.digest:
                raise EncodingError("the decoded bytes do not match")
            content = decoded
        return content if content is not None else stored

    def _fetch(self, name: str, stored: StoredBytes) -> memoryview:
        content = memoryview(bytearray(stored.length))
        self.read_run([(name, stored)], content)
        return content

    def check(self, name: str, stored: StoredBytes, content: memoryview) -> None:
        """Raise `CheckpointError` unless stored bytes are the ones that were written."""
        self._compare(name, stored, checksum(content))

    def _compare(self, name: str, stored: StoredBytes, found: str) -> None:
        if found != stored.checksum:
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
        if file.header and self._header_checksum(file) != file.header_checksum:
            raise corrupted(f"{file.key} is damaged: its header has changed", file.key)

    def _header_checksum(self, file: FileEntry) -> str:
        """Read in parts: a header is as long as the manifest says, which may be very long."""
        running = running_checksum()
        room = memoryview(bytearray(min(file.header, _HEADER_PART)))
        for start in range(0, file.header, _HEADER_PART):
            part = room[: file.header - start]
            self._reading(file.key, functools.partial(self._read, file.key, start, part))
            running.update(part)
        return running.hexdigest()

    def _read(self, key: str, start: int, into: memoryview) -> None:
        self._store.read_into(key, start, into)

    def _reading(self, key: str, operation: Callable[[], Result]) -> Result:
        try:
            return self._retry.run(operation)
        except (NotFoundError, EncodingError) as error:
            raise corrupted(f"{key} is missing or cut short: {error}", key) from error


def checksums_of(pieces: Iterable[memoryview], lengths: Sequence[int]) -> list[str]:
    """The checksums of chunks of these lengths, taken from their bytes as they pass, in any pieces."""
    found: list[str] = []
    running, left = running_checksum(), lengths[0]
    for passing in pieces:
        piece = passing
        while len(piece) >= left:
            running.update(piece[:left])
            found.append(running.hexdigest())
            if len(found) == len(lengths):
                return found
            piece = piece[left:]
            running, left = running_checksum(), lengths[len(found)]
        running.update(piece)
        left -= len(piece)
    return found


def _chain(data: StoredBytes) -> list[StoredBytes]:
    """A chunk's data, what it is a difference to, and so on."""
    links = [data]
    while links[-1].codec != RAW and codec_named(links[-1].codec).needs_base:
        base = links[-1].base
        if base is None:
            raise EncodingError(f"codec {links[-1].codec} needs something to start from")
        links.append(base)
    return links


def verify_chunk(
    source: StoredChunks, name: str, tensor: TensorMetadata, chunk: ChunkMetadata, room: memoryview
) -> None:
    """Read a chunk and prove it: the stored bytes, and what they decode to."""
    stored = room[: chunk.data.length] if chunk.data.length <= len(room) else None
    buffer = stored if stored is not None else memoryview(bytearray(chunk.data.length))
    source.read_range(chunk.data.file, chunk.data.start, buffer)
    source.decode(name, tensor, chunk, buffer)
