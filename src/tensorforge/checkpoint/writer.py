"""Writing a rank's files: copy, checksum and write overlap, on reused aligned buffers.

The file is cut into blocks. A thread computes the checksums of the chunks that begin in its block, fills its
buffer and writes it past the page cache; while it waits for the disk, the others copy and hash.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tensorforge.checkpoint.codecs import Codec
from tensorforge.checkpoint.dtypes import ITEM_SIZES
from tensorforge.checkpoint.image import Bytes, FileImage, PendingChunk
from tensorforge.checkpoint.manifest import (
    RAW,
    ChunkMetadata,
    FileEntry,
    StoredBytes,
    TensorMetadata,
    checksum,
)
from tensorforge.checkpoint.parallel import Guard, run_parallel
from tensorforge.checkpoint.progress import Meter
from tensorforge.checkpoint.staging import aligned, block_buffer, blocks
from tensorforge.storage.blobs import BlobStore, BlobWriter, PositionalBlobStore

WORKERS = 4
_WRITING = "writing the checkpoint"

Task = Callable[[Bytes], None]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A finished file: its entry in the manifest and its tensors, whose chunks say file number 0."""

    entry: FileEntry
    tensors: dict[str, TensorMetadata]


def write_file(
    store: BlobStore, image: FileImage, codec: Codec | None, guard: Guard, meter: Meter
) -> WrittenFile:
    """Write a file, durably; if this raises, nothing of it is left."""
    if codec is not None:
        return _write_frames(store, image, codec, guard, meter)
    checksums = [""] * len(image.chunks)
    if isinstance(store, PositionalBlobStore):
        _write_positional(store, image, checksums, guard, meter)
    else:
        _write_in_order(store, image, checksums, guard, meter)
    header = image.plan.header
    entry = FileEntry(image.plan.key, image.plan.size, len(header), checksum(header))
    stored = [
        StoredBytes(0, chunk.start, chunk.length, digest)
        for chunk, digest in zip(image.chunks, checksums, strict=True)
    ]
    return WrittenFile(entry, _tensors(image, stored))


def _hash_block(image: FileImage, checksums: list[str], start: int, stop: int) -> None:
    for number in image.chunks_beginning_in(start, stop):
        checksums[number] = checksum(image.chunk_bytes(image.chunks[number]).data)


def _write_positional(
    store: PositionalBlobStore,
    image: FileImage,
    checksums: list[str],
    guard: Guard,
    meter: Meter,
) -> None:
    writer = store.open_positional(image.plan.key, image.plan.size)

    def tasks() -> Iterator[Task]:
        for start, length in blocks(image.plan.size):

            def task(scratch: Bytes, start: int = start, length: int = length) -> None:
                _hash_block(image, checksums, start, start + length)
                writer.write_at(start, image.block(start, aligned(length), scratch).data)
                meter.add(length)

            yield task

    try:
        run_parallel(tasks(), block_buffer, workers=WORKERS, guard=guard, what=_WRITING)
        guard.check(_WRITING)
        writer.commit(image.plan.size)
    except BaseException:
        writer.abort()
        raise


def _write_in_order(
    store: BlobStore, image: FileImage, checksums: list[str], guard: Guard, meter: Meter
) -> None:
    def task(scratch: Bytes) -> None:
        with store.open_writer(image.plan.key, image.plan.size) as writer:
            for start, length in blocks(image.plan.size):
                guard.check(_WRITING)
                _hash_block(image, checksums, start, start + length)
                writer.append(image.block(start, length, scratch).data)
                meter.add(length)
            writer.commit()

    run_parallel([task], block_buffer, workers=1, guard=guard, what=_WRITING)


class _OrderedFrames:
    """Takes encoded chunks in any order and appends them in theirs."""

    def __init__(self, writer: BlobWriter, meter: Meter) -> None:
        self._writer = writer
        self._meter = meter
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[bytes, str, str | None, int]] = {}
        self._position = 0
        self.stored: list[StoredBytes] = []

    def put(self, number: int, frame: bytes, codec: str, digest: str | None, raw_size: int) -> None:
        with self._lock:
            self._waiting[number] = (frame, codec, digest, raw_size)
            while len(self.stored) in self._waiting:
                self._append(*self._waiting.pop(len(self.stored)))

    def _append(self, frame: bytes, codec: str, digest: str | None, raw_size: int) -> None:
        self._writer.append(frame)
        stored = StoredBytes(0, self._position, len(frame), checksum(frame), codec, digest)
        self.stored.append(stored)
        self._position += len(frame)
        self._meter.add(raw_size)


def _write_frames(
    store: BlobStore, image: FileImage, codec: Codec, guard: Guard, meter: Meter
) -> WrittenFile:
    with store.open_writer(image.plan.key) as writer:
        frames = _OrderedFrames(writer, meter)

        def tasks() -> Iterator[Callable[[None], None]]:
            for number, chunk in enumerate(image.chunks):

                def task(_: None, number: int = number, chunk: PendingChunk = chunk) -> None:
                    frames.put(number, *encode_chunk(image, chunk, codec), chunk.length)

                yield task

        run_parallel(tasks(), contextlib.nullcontext, workers=WORKERS, guard=guard, what=_WRITING)
        guard.check(_WRITING)
        size = writer.commit().size
    return WrittenFile(FileEntry(image.plan.key, size), _tensors(image, frames.stored))


def encode_chunk(
    image: FileImage, chunk: PendingChunk, codec: Codec
) -> tuple[bytes, str, str | None]:
    """The bytes to store for a chunk, the name of their codec, and the digest of the original.

    A chunk that does not get smaller is stored as it is.
    """
    raw = image.chunk_bytes(chunk).data
    encoded = codec.encode(raw, ITEM_SIZES[image.segment_of(chunk).dtype])
    if len(encoded) >= len(raw):
        return bytes(raw), RAW, None
    return encoded, codec.name, checksum(raw)


def _tensors(image: FileImage, stored: Iterable[StoredBytes]) -> dict[str, TensorMetadata]:
    """The tensors that a file's chunks belong to; an empty tensor has no chunk and is there all the same."""
    groups: dict[str, list[ChunkMetadata]] = {}
    kinds = {}
    for segment in image.plan.segments:
        groups.setdefault(segment.name, [])
        kinds[segment.name] = (segment.dtype, segment.shape)
    for chunk, data in zip(image.chunks, stored, strict=True):
        name = image.segment_of(chunk).name
        groups[name].append(ChunkMetadata(chunk.box.offset, chunk.box.shape, data))
    return {name: TensorMetadata(*kinds[name], tuple(chunks)) for name, chunks in groups.items()}
