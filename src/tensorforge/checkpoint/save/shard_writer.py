"""Writing a rank's files: copy, checksum and write overlap, on reused aligned buffers.

The file is cut into blocks, and a thread carries its block piece by piece: copy a piece into a small
buffer, add it to the checksum of its chunk, write it past the page cache. While it waits for the disk, the
others copy and hash; a piece is still in the processor's cache when it is hashed and when it is written.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from tensorforge.checkpoint.format.codecs import Codec
from tensorforge.checkpoint.format.dtypes import ITEM_SIZES
from tensorforge.checkpoint.format.manifest import (
    ChunkMetadata,
    FileEntry,
    StoredBytes,
    TensorMetadata,
    checksum,
    renumber,
    running_checksum,
)
from tensorforge.checkpoint.parallel import Guard, run_parallel
from tensorforge.checkpoint.progress import Meter
from tensorforge.checkpoint.save.chunk_reuse import Frame, Increment
from tensorforge.checkpoint.save.file_image import Bytes, FileImage, PendingChunk
from tensorforge.checkpoint.save.staging import (
    aligned,
    block_buffer,
    blocks,
    piece_buffer,
    pieces,
)
from tensorforge.storage.blobs import BlobStore, BlobWriter, PositionalBlobStore

WORKERS = 4
WRITERS = 5
"""Threads that copy, hash and write: four keep a disk busy, and about one of them is copying at any time."""
_WRITING = "writing the checkpoint"

Task = Callable[[Bytes], None]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A finished file and those that it leans on, as the manifest lists them, and its tensors."""

    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorMetadata]


def write_file(
    store: BlobStore,
    image: FileImage,
    codec: Codec | None,
    guard: Guard,
    meter: Meter,
    increment: Increment | None = None,
) -> WrittenFile:
    """Write a file, durably; if this raises, nothing of it is left.

    With an `increment`, only what that does not find in earlier files is written.
    """
    if codec is not None or increment is not None:
        return _write_frames(store, image, _Placing(image, codec, increment), guard, meter)
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
    return WrittenFile((entry,), _tensors(image, stored))


class _BlockChecksums:
    """The checksums of the chunks that begin in a block, taken from its pieces as they pass, in order."""

    def __init__(self, image: FileImage, checksums: list[str], start: int, stop: int) -> None:
        self._image = image
        self._checksums = checksums
        self._numbers = iter(image.chunks_beginning_in(start, stop))
        self._next()

    def _next(self) -> None:
        self._number = next(self._numbers, -1)
        self._running = running_checksum()

    def take(self, start: int, piece: Bytes) -> None:
        """Look at the file's bytes from `start`."""
        stop = start + len(piece)
        while self._number >= 0:
            chunk = self._image.chunks[self._number]
            if chunk.start >= stop:
                return
            low, high = max(chunk.start, start), min(chunk.start + chunk.length, stop)
            self._running.update(piece[low - start : high - start].data)
            if chunk.start + chunk.length > stop:
                return
            self._finish()

    def close(self, stop: int) -> None:
        """Complete a chunk that goes on beyond the block's end."""
        if self._number >= 0:
            chunk = self._image.chunks[self._number]
            self._running.update(self._image.chunk_bytes(chunk)[stop - chunk.start :].data)
            self._finish()

    def _finish(self) -> None:
        self._checksums[self._number] = self._running.hexdigest()
        self._next()


def _write_positional(
    store: PositionalBlobStore,
    image: FileImage,
    checksums: list[str],
    guard: Guard,
    meter: Meter,
) -> None:
    writer = store.open_positional(image.plan.key, image.plan.size)
    workplace = functools.partial(piece_buffer, guard)
    starts = [chunk.start for chunk in image.chunks]

    def tasks() -> Iterator[Task]:
        for start, length in blocks(image.plan.size, starts):

            def task(scratch: Bytes, start: int = start, stop: int = start + length) -> None:
                passing = _BlockChecksums(image, checksums, start, stop)
                for at, size in pieces(start, stop):
                    piece = image.block(at, aligned(size), scratch)
                    passing.take(at, piece)
                    writer.write_at(at, piece.data)
                    meter.add(size)
                passing.close(stop)

            yield task

    try:
        run_parallel(tasks(), workplace, workers=WRITERS, guard=guard, what=_WRITING)
        guard.check(_WRITING)
        writer.commit(image.plan.size)
    except BaseException:
        writer.abort()
        raise


def _write_in_order(
    store: BlobStore, image: FileImage, checksums: list[str], guard: Guard, meter: Meter
) -> None:
    def task(scratch: Bytes) -> None:
        passing = _BlockChecksums(image, checksums, 0, image.plan.size)
        with store.open_writer(image.plan.key, image.plan.size) as writer:
            for start, length in blocks(image.plan.size):
                guard.check(_WRITING)
                block = image.block(start, length, scratch)
                passing.take(start, block)
                writer.append(block.data)
                meter.add(length)
            writer.commit()

    workplace = functools.partial(block_buffer, guard)
    run_parallel([task], workplace, workers=1, guard=guard, what=_WRITING)


class _OrderedFrames:
    """Takes placed chunks in any order and appends those that are new in theirs."""

    def __init__(self, writer: BlobWriter, meter: Meter) -> None:
        self._writer = writer
        self._meter = meter
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Frame | StoredBytes, int]] = {}
        self.size = 0
        self.stored: list[StoredBytes] = []

    def put(self, number: int, placed: Frame | StoredBytes, raw_size: int) -> None:
        with self._lock:
            self._waiting[number] = (placed, raw_size)
            while len(self.stored) in self._waiting:
                placed, raw_size = self._waiting.pop(len(self.stored))
                self.stored.append(
                    self._append(placed) if isinstance(placed, Frame) else _behind_own(placed)
                )
                self._meter.add(raw_size)

    def _append(self, frame: Frame) -> StoredBytes:
        self._writer.append(frame.content)
        start, length = self.size, len(frame.content)
        self.size += length
        base = None if frame.base is None else _behind_own(frame.base)
        check = checksum(frame.content)
        return StoredBytes(0, start, length, check, frame.codec, frame.digest, base)


def _behind_own(stored: StoredBytes) -> StoredBytes:
    """In the manifest the file that is being written comes first, those of the increment follow."""
    return renumber(stored, lambda file: file + 1)


class _Placing:
    """Decides about chunks: found in earlier files, compressed, or as they are."""

    def __init__(self, image: FileImage, codec: Codec | None, increment: Increment | None) -> None:
        self._image = image
        self._codec = codec
        self._increment = increment
        self.files = () if increment is None else increment.files

    def place(self, chunk: PendingChunk) -> Frame | StoredBytes:
        raw = self._image.chunk_bytes(chunk).data
        segment = self._image.segment_of(chunk)
        if self._increment is not None:
            placed = self._increment.place(segment.name, segment.dtype, chunk.box, raw)
            if placed is not None:
                return placed
        if self._codec is not None:
            return compressed(raw, ITEM_SIZES[segment.dtype], self._codec)
        return Frame(raw)


def compressed(raw: memoryview, item_size: int, codec: Codec) -> Frame:
    """A chunk made smaller by a codec, or as it is if that does not make it smaller."""
    encoded = codec.encode(raw, item_size)
    if len(encoded) >= len(raw):
        return Frame(raw)
    return Frame(encoded, codec.name, checksum(raw))


def _write_frames(
    store: BlobStore, image: FileImage, placing: _Placing, guard: Guard, meter: Meter
) -> WrittenFile:
    with store.open_writer(image.plan.key) as writer:
        frames = _OrderedFrames(writer, meter)

        def tasks() -> Iterator[Callable[[None], None]]:
            for number, chunk in enumerate(image.chunks):

                def task(_: None, number: int = number, chunk: PendingChunk = chunk) -> None:
                    frames.put(number, placing.place(chunk), chunk.length)

                yield task

        run_parallel(tasks(), contextlib.nullcontext, workers=WORKERS, guard=guard, what=_WRITING)
        guard.check(_WRITING)
        if frames.size:  # if nothing is new, there is no file
            writer.commit()
    own = FileEntry(image.plan.key, frames.size)
    return _without_unused((own, *placing.files), _tensors(image, frames.stored))


def _without_unused(
    files: tuple[FileEntry, ...], tensors: dict[str, TensorMetadata]
) -> WrittenFile:
    """Leave out files that no chunk lies in, so that a checkpoint is tied to as few others as can be."""
    used: dict[int, int] = {}

    def number(file: int) -> int:
        return used.setdefault(file, len(used))

    kept = {
        name: msgspec.structs.replace(
            tensor,
            chunks=tuple(
                msgspec.structs.replace(chunk, data=renumber(chunk.data, number))
                for chunk in tensor.chunks
            ),
        )
        for name, tensor in tensors.items()
    }
    return WrittenFile(tuple(files[file] for file in used), kept)


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
