"""Getting verified bytes out of a checkpoint's files. Starts without torch.

Whoever stores chunks in another way (differences, content-addressed files) needs a codec, not another reader:
the manifest says where the bytes of a chunk lie, how they are encoded, and what they were taken from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from tensorforge.checkpoint.format.codecs import codec_named
from tensorforge.checkpoint.format.dtypes import ITEM_SIZES
from tensorforge.checkpoint.format.manifest import (
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


class Landing(NamedTuple):
    """Named chunks that lie side by side in a file, and the memory that they fill, one behind the other."""

    memory: memoryview
    chunks: Sequence[tuple[str, StoredBytes]]

    def places(self) -> Iterator[memoryview]:
        """The memory of each chunk."""
        start = 0
        for _, stored in self.chunks:
            yield self.memory[start : start + stored.length]
            start += stored.length


class ChunkSource(Protocol):
    """Where a reader gets chunks from."""

    @property
    def manifest(self) -> CheckpointManifest:
        """The checkpoint's manifest."""

    def is_at_hand(self, file: int) -> bool:
        """Whether reading a file is mere copying, without waiting for a disk or a network."""

    @property
    def reads_on(self) -> bool:
        """Whether a run is read at one go; otherwise, each of its landings costs a request."""

    def read_range(self, file: int, start: int, into: memoryview) -> None:
        """Fill a buffer with bytes of a file, as they are stored."""

    def read_run(self, run: Sequence[Landing]) -> None:
        """Read chunks that are stored as they are, one behind the other in a file; verify each."""

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
        return self._reading(key, functools.partial(self._piecewise.is_cached, key))

    def read_range(self, file: int, start: int, into: memoryview) -> None:
        """Fill a buffer with bytes of a file, as they are stored."""
        key = self._manifest.files[file].key
        self._reading(key, functools.partial(self._read, key, start, into))

    @property
    def reads_on(self) -> bool:
        """Whether a run is read at one go; otherwise, each of its landings costs a request."""
        return self._piecewise is not None

    def read_run(self, run: Sequence[Landing]) -> None:
        """Read chunks that are stored as they are, one behind the other in a file; verify each."""
        key = self._manifest.files[run[0].chunks[0][1].file].key
        found = self._reading(key, functools.partial(self._read_and_hash, key, run))
        chunks = (chunk for landing in run for chunk in landing.chunks)
        for (name, stored), digest in zip(chunks, found, strict=True):
            self._compare(name, stored, digest)

    def _read_and_hash(self, key: str, run: Sequence[Landing]) -> list[str]:
        """The checksums of a run's chunks, taken while their bytes pass, if the store can show them."""
        found = []
        if self._piecewise is None:
            for landing in run:
                self._store.read_into(key, landing.chunks[0][1].start, landing.memory)
                found += [checksum(place) for place in landing.places()]
            return found
        length = sum(len(landing.memory) for landing in run)
        with self._piecewise.open_range(key, run[0].chunks[0][1].start, length) as reader:
            for landing in run:
                for place in landing.places():
                    running = running_checksum()
                    reader.fill(place, running.update)
                    found.append(running.hexdigest())
        return found

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
        self.read_run([Landing(content, [(name, stored)])])
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
