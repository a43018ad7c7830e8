"""Writes the files of a rank. Several threads copy, hash and write at the same time, in reused aligned buffers.

A file is divided into blocks, one for each task. A thread copies a few megabytes of its block into a buffer,
adds them to the checksums of their chunks and writes them past the page cache, then continues with the next.
While one thread waits for the disk, others copy and hash; the bytes are in the processor's cache all the time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tensorforge.checkpoint.format.codecs import Codec
from tensorforge.checkpoint.format.formats import ITEM_SIZES
from tensorforge.checkpoint.format.manifest import (
    ChunkMetadata,
    FileEntry,
    StoredBytes,
    TensorMetadata,
    checksum,
    renumber,
    renumber_chunks,
    running_checksum,
)
from tensorforge.checkpoint.parallel import ByteCounter, Deadline, run_parallel
from tensorforge.checkpoint.save.chunk_reuse import EncodedChunk, Increment
from tensorforge.checkpoint.save.file_contents import Bytes, FileContents, PendingChunk
from tensorforge.checkpoint.save.staging import (
    aligned,
    block_buffer,
    blocks,
    write_buffer,
    writes,
)
from tensorforge.storage.blobs import BlobStore, BlobWriter, PositionalBlobStore

WORKERS = 4
WRITERS = 5
"""The number of threads that copy, hash and write: four keep a disk busy while about one copies."""
_WRITING = "writing the checkpoint"

Task = Callable[[Bytes], None]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that was written and the files that its chunks refer to, for the manifest; and its tensors."""

    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorMetadata]


def write_file(
    store: BlobStore,
    contents: FileContents,
    codec: Codec | None,
    deadline: Deadline,
    counter: ByteCounter,
    increment: Increment | None = None,
) -> WrittenFile:
    """Write a file durably. If this raises, the file does not exist.

    With an `increment`, only the chunks that it does not find in earlier files are written.
    """
    if codec is not None or increment is not None:
        encoder = _ChunkEncoder(contents, codec, increment)
        return _write_encoded(store, contents, encoder, deadline, counter)
    checksums = [""] * len(contents.chunks)
    if isinstance(store, PositionalBlobStore):
        _write_positional(store, contents, checksums, deadline, counter)
    else:
        _write_in_order(store, contents, checksums, deadline, counter)
    header = contents.plan.header
    entry = FileEntry(contents.plan.key, contents.plan.size, len(header), checksum(header))
    stored = [
        StoredBytes(0, chunk.start, chunk.length, digest)
        for chunk, digest in zip(contents.chunks, checksums, strict=True)
    ]
    return WrittenFile((entry,), _tensors(contents, stored))


class _BlockChecksums:
    """Computes the checksums of the chunks that begin in a block, from the bytes of its writes in order."""

    def __init__(self, contents: FileContents, checksums: list[str], start: int, stop: int) -> None:
        self._contents = contents
        self._checksums = checksums
        self._numbers = iter(contents.chunks_beginning_in(start, stop))
        self._next()

    def _next(self) -> None:
        self._number = next(self._numbers, -1)
        self._running = running_checksum()

    def update(self, start: int, content: Bytes) -> None:
        """Add the bytes of the file from `start` on."""
        stop = start + len(content)
        while self._number >= 0:
            chunk = self._contents.chunks[self._number]
            if chunk.start >= stop:
                return
            low, high = max(chunk.start, start), min(chunk.start + chunk.length, stop)
            self._running.update(content[low - start : high - start].data)
            if chunk.start + chunk.length > stop:
                return
            self._finish()

    def close(self, stop: int) -> None:
        """Add the bytes of the last chunk that are after the end of the block."""
        if self._number >= 0:
            chunk = self._contents.chunks[self._number]
            self._running.update(self._contents.chunk_bytes(chunk)[stop - chunk.start :].data)
            self._finish()

    def _finish(self) -> None:
        self._checksums[self._number] = self._running.hexdigest()
        self._next()


def _write_positional(
    store: PositionalBlobStore,
    contents: FileContents,
    checksums: list[str],
    deadline: Deadline,
    counter: ByteCounter,
) -> None:
    writer = store.open_positional(contents.plan.key, contents.plan.size)
    buffer = functools.partial(write_buffer, deadline)
    starts = [chunk.start for chunk in contents.chunks]

    def tasks() -> Iterator[Task]:
        for start, length in blocks(contents.plan.size, starts):

            def task(scratch: Bytes, start: int = start, stop: int = start + length) -> None:
                hashes = _BlockChecksums(contents, checksums, start, stop)
                for at, size in writes(start, stop):
                    content = contents.read(at, aligned(size), scratch)
                    hashes.update(at, content)
                    writer.write_at(at, content.data)
                    counter.add(size)
                hashes.close(stop)

            yield task

    try:
        run_parallel(tasks(), buffer, workers=WRITERS, deadline=deadline, what=_WRITING)
        deadline.check(_WRITING)
        writer.commit(contents.plan.size)
    except BaseException:
        writer.abort()
        raise


def _write_in_order(
    store: BlobStore,
    contents: FileContents,
    checksums: list[str],
    deadline: Deadline,
    counter: ByteCounter,
) -> None:
    def task(scratch: Bytes) -> None:
        hashes = _BlockChecksums(contents, checksums, 0, contents.plan.size)
        with store.open_writer(contents.plan.key, contents.plan.size) as writer:
            for start, length in blocks(contents.plan.size):
                deadline.check(_WRITING)
                content = contents.read(start, length, scratch)
                hashes.update(start, content)
                writer.append(content.data)
                counter.add(length)
            writer.commit()

    buffer = functools.partial(block_buffer, deadline)
    run_parallel([task], buffer, workers=1, deadline=deadline, what=_WRITING)


class _OrderedChunks:
    """Receives chunks in any order and appends the new ones to the file in the order of their numbers."""

    def __init__(self, writer: BlobWriter, counter: ByteCounter) -> None:
        self._writer = writer
        self._counter = counter
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[EncodedChunk | StoredBytes, int]] = {}
        self.size = 0
        self.stored: list[StoredBytes] = []

    def put(self, number: int, chunk: EncodedChunk | StoredBytes, raw_size: int) -> None:
        with self._lock:
            self._waiting[number] = (chunk, raw_size)
            while len(self.stored) in self._waiting:
                chunk, raw_size = self._waiting.pop(len(self.stored))
                self.stored.append(
                    self._append(chunk)
                    if isinstance(chunk, EncodedChunk)
                    else _after_own_file(chunk)
                )
                self._counter.add(raw_size)

    def _append(self, chunk: EncodedChunk) -> StoredBytes:
        self._writer.append(chunk.content)
        start, length = self.size, len(chunk.content)
        self.size += length
        base = None if chunk.base is None else _after_own_file(chunk.base)
        check = checksum(chunk.content)
        return StoredBytes(0, start, length, check, chunk.codec, chunk.digest, base)


def _after_own_file(stored: StoredBytes) -> StoredBytes:
    """The same bytes in a list where the files of the increment follow the file that is being written."""
    return renumber(stored, lambda file: file + 1)


class _ChunkEncoder:
    """Finds a chunk in earlier files, or encodes it, or leaves it as it is."""

    def __init__(
        self, contents: FileContents, codec: Codec | None, increment: Increment | None
    ) -> None:
        self._contents = contents
        self._codec = codec
        self._increment = increment
        self.files = () if increment is None else increment.files

    def encode(self, chunk: PendingChunk) -> EncodedChunk | StoredBytes:
        raw = self._contents.chunk_bytes(chunk).data
        placed = self._contents.box_of(chunk)
        if self._increment is not None:
            reused = self._increment.reuse(placed.name, placed.dtype, chunk.box, raw)
            if reused is not None:
                return reused
        if self._codec is not None:
            return _compress(raw, ITEM_SIZES[placed.dtype], self._codec)
        return EncodedChunk(raw)


def _compress(raw: memoryview, item_size: int, codec: Codec) -> EncodedChunk:
    """The chunk encoded by a codec, or raw if the codec does not make it smaller."""
    encoded = codec.encode(raw, item_size)
    if len(encoded) >= len(raw):
        return EncodedChunk(raw)
    return EncodedChunk(encoded, codec.name, checksum(raw))


def _write_encoded(
    store: BlobStore,
    contents: FileContents,
    encoder: _ChunkEncoder,
    deadline: Deadline,
    counter: ByteCounter,
) -> WrittenFile:
    with store.open_writer(contents.plan.key) as writer:
        chunks = _OrderedChunks(writer, counter)

        def tasks() -> Iterator[Callable[[None], None]]:
            for number, chunk in enumerate(contents.chunks):

                def task(_: None, number: int = number, chunk: PendingChunk = chunk) -> None:
                    chunks.put(number, encoder.encode(chunk), chunk.length)

                yield task

        run_parallel(
            tasks(), contextlib.nullcontext, workers=WORKERS, deadline=deadline, what=_WRITING
        )
        deadline.check(_WRITING)
        if chunks.size:  # without new chunks there is no file
            writer.commit()
    own = FileEntry(contents.plan.key, chunks.size)
    return _without_unused((own, *encoder.files), _tensors(contents, chunks.stored))


def _without_unused(
    files: tuple[FileEntry, ...], tensors: dict[str, TensorMetadata]
) -> WrittenFile:
    """Leave out the files without chunks, so that a checkpoint depends on as few others as possible."""
    used: dict[int, int] = {}

    def number(file: int) -> int:
        return used.setdefault(file, len(used))

    kept = {name: renumber_chunks(tensor, number) for name, tensor in tensors.items()}
    return WrittenFile(tuple(files[file] for file in used), kept)


def _tensors(contents: FileContents, stored: Iterable[StoredBytes]) -> dict[str, TensorMetadata]:
    """The tensors of a file with their chunks. An empty tensor is among them, without chunks."""
    groups: dict[str, list[ChunkMetadata]] = {}
    kinds = {}
    for placed in contents.plan.boxes:
        groups.setdefault(placed.name, [])
        kinds[placed.name] = (placed.dtype, placed.shape)
    for chunk, data in zip(contents.chunks, stored, strict=True):
        name = contents.box_of(chunk).name
        groups[name].append(ChunkMetadata(chunk.box.offset, chunk.box.shape, data))
    return {name: TensorMetadata(*kinds[name], tuple(chunks)) for name, chunks in groups.items()}
