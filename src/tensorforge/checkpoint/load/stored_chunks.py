"""Reads the chunks of a checkpoint from its files, verifies their checksums and decodes them. Imports no torch.

A manifest says for each chunk in which file its bytes are, by which codec they are encoded and what they are
a difference to. So another way to store chunks needs another codec, and no other reader.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from tensorforge.checkpoint.format.codecs import codec_named
from tensorforge.checkpoint.format.formats import ITEM_SIZES
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

_HEADER_READ = 4 << 20


class BufferRead(NamedTuple):
    """Consecutive chunks of a file (tensor name, place), and the buffer that they fill in the same order."""

    memory: memoryview
    chunks: Sequence[tuple[str, StoredBytes]]

    def chunk_buffers(self) -> Iterator[memoryview]:
        """The range of the buffer for each chunk."""
        start = 0
        for _, stored in self.chunks:
            yield self.memory[start : start + stored.length]
            start += stored.length


class StoredChunks:
    """The chunks of one checkpoint in a store."""

    def __init__(
        self, store: BlobStore, manifest: CheckpointManifest, retry: RetryPolicy | None = None
    ) -> None:
        self._store = store
        self._sequential = store if isinstance(store, PiecewiseBlobStore) else None
        self._retry = retry or RetryPolicy()
        self._manifest = manifest

    @property
    def manifest(self) -> CheckpointManifest:
        """The checkpoint's manifest."""
        return self._manifest

    def is_cached(self, file: int) -> bool:
        """Whether reading the file only copies memory, without waiting for a disk or a network."""
        if self._sequential is None:
            return False
        key = self._manifest.files[file].key
        return self._reading(key, functools.partial(self._sequential.is_cached, key))

    def read_range(self, file: int, start: int, into: memoryview) -> None:
        """Fill a buffer with bytes of a file as they are stored."""
        key = self._manifest.files[file].key
        self._reading(key, functools.partial(self._store.read_into, key, start, into))

    @property
    def reads_sequentially(self) -> bool:
        """Whether `read_raw` costs one request in all; otherwise it costs one request for each buffer."""
        return self._sequential is not None

    def read_raw(self, reads: Sequence[BufferRead]) -> None:
        """Read consecutive chunks of one file, with codec `raw`, into several buffers; verify each chunk."""
        key = self._manifest.files[reads[0].chunks[0][1].file].key
        found = self._reading(key, functools.partial(self._read_and_hash, key, reads))
        chunks = (chunk for read in reads for chunk in read.chunks)
        for (name, stored), digest in zip(chunks, found, strict=True):
            self._compare(name, stored, digest)

    def _read_and_hash(self, key: str, reads: Sequence[BufferRead]) -> list[str]:
        """Fill the buffers and return the checksum of each chunk.

        A store that reads sequentially shows the bytes as they arrive, while they are in the processor's cache.
        """
        found = []
        if self._sequential is None:
            for read in reads:
                self._store.read_into(key, read.chunks[0][1].start, read.memory)
                found += [checksum(buffer) for buffer in read.chunk_buffers()]
            return found
        length = sum(len(read.memory) for read in reads)
        with self._sequential.open_range(key, reads[0].chunks[0][1].start, length) as reader:
            for buffer in (buffer for read in reads for buffer in read.chunk_buffers()):
                running = running_checksum()
                reader.fill(buffer, running.update)
                found.append(running.hexdigest())
        return found

    def decode(
        self, name: str, tensor: TensorMetadata, chunk: ChunkMetadata, stored: memoryview
    ) -> memoryview:
        """Verify the stored bytes of a chunk and decode them."""
        self._compare(name, chunk.data, checksum(stored))
        if chunk.data.codec == RAW:
            return stored
        key = self._manifest.files[chunk.data.file].key
        try:
            return self._decode_chain(name, tensor, chunk, stored)
        except EncodingError as error:
            raise corrupted(f"{key}, tensor {name!r}: {error}", key) from error

    def _decode_chain(
        self, name: str, tensor: TensorMetadata, chunk: ChunkMetadata, stored: memoryview
    ) -> memoryview:
        """Decode a chain of differences, its first base first, so that only one link is in memory at a time."""
        item = ITEM_SIZES[tensor.dtype]
        content: memoryview | None = None
        for link in reversed(_chain(chunk.data)):
            encoded = stored if link is chunk.data else self._fetch(name, link)
            if link.codec == RAW:
                content = encoded
                continue
            decoded = memoryview(bytearray(chunk.box.size * item))
            codec_named(link.codec).decode(encoded, decoded, item, content)
            if checksum(decoded) != link.digest:
                raise EncodingError("the decoded bytes do not match")
            content = decoded
        return content if content is not None else stored

    def _fetch(self, name: str, stored: StoredBytes) -> memoryview:
        content = memoryview(bytearray(stored.length))
        self.read_raw([BufferRead(content, [(name, stored)])])
        return content

    def _compare(self, name: str, stored: StoredBytes, found: str) -> None:
        if found != stored.checksum:
            key = self._manifest.files[stored.file].key
            raise corrupted(
                f"{key} is damaged: tensor {name!r}, bytes {stored.start} to "
                f"{stored.start + stored.length}, do not have the checksum with which they were written",
                key,
            )

    def check_file(self, file: FileEntry) -> None:
        """Raise `CheckpointError` unless a file has the right size and an intact header."""
        info = self._reading(file.key, lambda: self._store.stat(file.key))
        if info.size != file.size:
            raise corrupted(f"{file.key} has {info.size} bytes instead of {file.size}", file.key)
        if file.header and self._header_checksum(file) != file.header_checksum:
            raise corrupted(f"{file.key} is damaged: its header has changed", file.key)

    def _header_checksum(self, file: FileEntry) -> str:
        """Read in several steps, because the length in the manifest may be any number."""
        running = running_checksum()
        buffer = memoryview(bytearray(min(file.header, _HEADER_READ)))
        for start in range(0, file.header, _HEADER_READ):
            into = buffer[: file.header - start]
            self._reading(file.key, functools.partial(self._store.read_into, file.key, start, into))
            running.update(into)
        return running.hexdigest()

    def _reading(self, key: str, operation: Callable[[], Result]) -> Result:
        try:
            return self._retry.run(operation)
        except (NotFoundError, EncodingError) as error:
            raise corrupted(f"{key} is missing or too short: {error}", key) from error


def _chain(data: StoredBytes) -> list[StoredBytes]:
    """The data of a chunk, the base of that, the base of the base, and so on."""
    links = [data]
    while links[-1].codec != RAW and codec_named(links[-1].codec).needs_base:
        base = links[-1].base
        if base is None:
            raise EncodingError(f"codec {links[-1].codec} needs a base")
        links.append(base)
    return links


def read_chunk(
    source: StoredChunks,
    name: str,
    tensor: TensorMetadata,
    chunk: ChunkMetadata,
    scratch: memoryview | None = None,
) -> memoryview:
    """Read a chunk, in `scratch` if that is large enough; verify the stored and the decoded bytes."""
    length = chunk.data.length
    if scratch is None or length > len(scratch):
        scratch = memoryview(bytearray(length))
    stored = scratch[:length]
    source.read_range(chunk.data.file, chunk.data.start, stored)
    return source.decode(name, tensor, chunk, stored)
