"""The shards that a worker holds: a folder of segments.

    folder/schema.json               what a sample is, and how many the whole data set has
    folder/segments/START-STOP.tfs   the ranges held here
    folder/incoming/START-STOP.part  a range on its way; what is in it was verified

The folder's listing is the truth: there is no index that could differ from it. Files are not
synced to disk, because every one is a copy; a segment that a power failure tore is found by its checksums.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from tensorforge.data.plan.intervals import IntervalSet
from tensorforge.data.segments.range_stream import RangeStream
from tensorforge.data.segments.segment import (
    BLOCK,
    HEADER,
    SampleSchema,
    Segment,
    checksum,
    encode_header,
    encode_table,
    file_bytes,
    find_segment,
    parse_name,
    segment_name,
)
from tensorforge.encoding import decode, encode
from tensorforge.errors import (
    CapacityError,
    ClosedError,
    ConflictError,
    EncodingError,
    InvalidInputError,
    NotFoundError,
    TransferCancelledError,
    UnavailableError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """What all holders of a data set agree on: what a sample is, and how many there are."""

    size: int
    schema: SampleSchema

    def to_json(self) -> bytes:
        """The content of `schema.json`."""
        return json.dumps(encode(self), indent=2).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, where: str) -> DatasetInfo:
        """Read `schema.json`; anything else is an `EncodingError` that names the place."""
        try:
            return decode(json.loads(data), cls)
        except ValueError as error:
            raise EncodingError(f"{where} does not describe a data set: {error}") from error


class ShardStore:
    """The segments in a local folder: a map-style data set of what is held, and a place for what arrives.

    Safe to share between threads. With `info`, a new folder is set up, and an existing one must agree.
    """

    def __init__(self, folder: str | Path, info: DatasetInfo | None = None) -> None:
        self.folder = Path(folder)
        self._lock = threading.RLock()
        self._segments: list[Segment] = []
        self._maps: dict[str, _MappedFile] = {}
        self._arriving: dict[tuple[int, int], PartFile] = {}
        self._closed = False
        self.info = self._settle(info)
        self.refresh()

    def _settle(self, info: DatasetInfo | None) -> DatasetInfo:
        path = self.folder / "schema.json"
        if path.exists():
            found = DatasetInfo.from_json(path.read_bytes(), str(path))
            if info is not None and info != found:
                raise ConflictError(f"{self.folder} holds another data set: {found}, not {info}")
            return found
        if info is None:
            raise NotFoundError(f"{self.folder} is not a shard store: it has no schema.json")
        with _translated(str(self.folder), 0):
            for name in ("segments", "incoming"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            fresh = self.folder / f"schema.json.{os.getpid()}"
            fresh.write_bytes(info.to_json())
            fresh.replace(path)
        return info

    def refresh(self) -> None:
        """Open the segments that came since, and forget those that are gone."""
        with self._lock:
            self._check_open()
            names = {p.name for p in (self.folder / "segments").iterdir() if parse_name(p.name)}
            for name in set(self._maps) - names:
                del self._maps[name]
            for name in names - set(self._maps):
                self._maps[name] = _MappedFile(self.folder / "segments" / name, self.info.schema)
            opened = [file.segment for file in self._maps.values()]
            self._segments = sorted(opened, key=lambda segment: (segment.start, segment.stop))

    @property
    def held(self) -> IntervalSet:
        """The samples that are here."""
        return IntervalSet.of((segment.start, segment.stop) for segment in self._segments)

    def __len__(self) -> int:
        """How many samples the data set has, here or elsewhere."""
        return self.info.size

    def __getitem__(self, index: int) -> Any:
        """One sample; `NotFoundError` if it is not held here."""
        return self.info.schema.decode(self._segment_of(index).sample(index))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples: what torch's loaders ask for a batch at once."""
        return [self[index] for index in indices]

    def _segment_of(self, index: int) -> Segment:
        segment = find_segment(self._segments, index)
        if segment is None:
            if not 0 <= index < self.info.size:
                raise IndexError(f"sample {index} is not in [0, {self.info.size})")
            raise NotFoundError(
                f"sample {index} is not held in {self.folder}: fetch its shard first"
            )
        return segment

    def open_range(self, start: int, stop: int) -> RangeStream:
        """The samples `[start, stop)` as the bytes that travel; `NotFoundError` unless all are held."""
        if not self.held.covers(start, stop):
            missing = IntervalSet.span(stop, start) - self.held
            raise NotFoundError(f"{self.folder} does not hold {missing}")
        return RangeStream(self._segments, start, stop)

    def put(self, start: int, stop: int, samples: Any) -> None:
        """Store samples that are in memory: an array, or a list of records."""
        body = body_of(self.info.schema, start, stop, samples)
        with self.receive(start, stop) as part:
            part.begin(len(body))
            part.restart()
            for offset in range(0, len(body), BLOCK):
                part.append(body[offset : offset + BLOCK])
            part.commit()

    def receive(self, start: int, stop: int) -> PartFile:
        """Begin, or go on with, the file of a range that arrives in blocks.

        Whoever received the same range before, and may still wait for its next block, can add nothing more.
        """
        if not 0 <= start < stop <= self.info.size:
            raise InvalidInputError(f"[{start}, {stop}) is no range of [0, {self.info.size})")
        with self._lock:
            self._check_open()
            if (start, stop) in self._arriving:
                self._arriving[start, stop].supersede()
            part = self._arriving[start, stop] = PartFile(self, start, stop)
        part.take_over()
        return part

    def has_ended(self, part: PartFile) -> None:
        """Nobody adds to it any more."""
        with self._lock:
            if self._arriving.get((part.start, part.stop)) is part:
                del self._arriving[part.start, part.stop]

    def release(self, keep: IntervalSet) -> IntervalSet:
        """Delete the segments of which nothing is to be kept, and return what that removed."""
        with self._lock:
            before = self.held
            for segment in self._segments:
                if not keep.touches(segment.start, segment.stop):
                    (self.folder / "segments" / segment.name).unlink(missing_ok=True)
            self.refresh()
            return before - self.held

    def drop(self, index: int) -> None:
        """Delete the segment that holds sample `index`: it is damaged."""
        with self._lock:
            segment = find_segment(self._segments, index)
            if segment is not None:
                (self.folder / "segments" / segment.name).unlink(missing_ok=True)
                self.refresh()

    def clear_incoming(self, keep: Sequence[tuple[int, int]] = ()) -> None:
        """Delete what is left of ranges that nobody fetches any more; `keep` are those that go on."""
        wanted = {f"{segment_name(start, stop)[:-4]}.part" for start, stop in keep}
        for path in (self.folder / "incoming").iterdir():
            if path.name not in wanted:
                path.unlink(missing_ok=True)

    def verify(self) -> None:
        """Compare every byte with its checksum; `IntegrityError` names the first that differs."""
        for segment in list(self._segments):
            for offset in range(0, segment.body_bytes, BLOCK):
                segment.body(offset, min(BLOCK, segment.body_bytes - offset))

    def close(self) -> None:
        """Let go of the files; closing again changes nothing."""
        with self._lock:
            self._closed = True
            self._segments = []
            self._maps = {}

    def __reduce__(self) -> tuple[type[ShardStore], tuple[Path]]:
        """Another process, such as a loader's worker, opens the same folder."""
        return ShardStore, (self.folder,)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the shard store {self.folder} was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _MappedFile:
    """A segment's file in memory, for as long as this or a view of it lives."""

    def __init__(self, path: Path, schema: SampleSchema) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            if not size:
                raise EncodingError(f"{path.name}: the file is empty")
            self._view = memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
        finally:
            os.close(descriptor)
        self.segment = Segment(path.name, schema, self._read, size)

    def _read(self, offset: int, length: int) -> memoryview:
        return self._view[offset : offset + length]


class PartFile:
    """A range on its way in. What was appended survives this process; `commit` makes it a segment.

    `verified_bytes` is where to go on: whole blocks, or the end. Blocks that an earlier process left are
    read again; whether they are the source's is settled by comparing `prefix_checksum`.
    """

    def __init__(self, store: ShardStore, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.body_bytes = 0
        self.verified_bytes = 0
        self._store = store
        self._name = segment_name(start, stop)
        self._path = store.folder / "incoming" / f"{self._name[:-4]}.part"
        self._checksums: list[int] = []
        self._lock = threading.Lock()
        self._is_superseded = False
        with _translated(str(self._path), 0):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o644)

    def supersede(self) -> None:
        """Refuse whatever comes from now on: another attempt goes on with the file."""
        with self._lock:
            self._is_superseded = True

    def take_over(self) -> None:
        """Go on with what an earlier attempt left, in whole blocks."""
        header = os.pread(self._descriptor, HEADER.size, 0)
        if len(header) < HEADER.size:
            return
        size = HEADER.unpack(header)[3]
        if header != encode_header(self.start, self.stop, size):
            return
        present = min(os.fstat(self._descriptor).st_size - HEADER.size, size)
        end = present if present == size else present - present % BLOCK
        for offset in range(0, end, BLOCK):
            block = os.pread(self._descriptor, min(BLOCK, end - offset), HEADER.size + offset)
            self._checksums.append(checksum(block))
        self.body_bytes, self.verified_bytes = size, end

    def begin(self, body_bytes: int) -> None:
        """Say how large the body is; what an earlier attempt left of another size is thrown away."""
        if self._checksums and self.body_bytes == body_bytes:
            return
        self.body_bytes = body_bytes
        self.restart()

    def restart(self) -> None:
        """Throw away what is here: it is not the beginning of what the source has."""
        self._checksums, self.verified_bytes = [], 0
        with self._writing():
            if os.fstat(
                self._descriptor
            ).st_size:  # ext4 flushes a truncated file when it is closed
                os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, encode_header(self.start, self.stop, self.body_bytes), 0)

    @property
    def prefix_checksum(self) -> int:
        """One number for everything verified so far; both sides of a resumed transfer compare it."""
        return checksum_of_checksums(self._checksums)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        return self.verified_bytes == self.body_bytes

    def append(self, block: bytes | bytearray | memoryview, found: int | None = None) -> None:
        """Add the next block; `found` is its checksum if the caller has computed it already."""
        expected = min(BLOCK, self.body_bytes - self.verified_bytes)
        if len(block) != expected:
            raise InvalidInputError(f"a block of {len(block)} bytes came, expected {expected}")
        view, offset = memoryview(block), HEADER.size + self.verified_bytes
        with self._writing():
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written
        self._checksums.append(checksum(block) if found is None else found)
        self.verified_bytes += len(block)

    def commit(self) -> None:
        """Make the complete range a segment of the store, in one move."""
        if not self.is_complete:
            raise ConflictError(
                f"{self._name}: {self.verified_bytes} of {self.body_bytes} bytes are here"
            )
        with self._writing():
            end = HEADER.size + self.body_bytes
            table = encode_table(self._checksums)
            os.pwrite(self._descriptor, table, end)
            os.ftruncate(self._descriptor, end + len(table))
            self._path.replace(self._store.folder / "segments" / self._name)
        self._store.refresh()

    def discard(self) -> None:
        """Remove the file and give its room back."""
        with self._writing():
            self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock, _translated(str(self._path), file_bytes(self.body_bytes)):
            if self._is_superseded:
                raise TransferCancelledError(f"another transfer of {self._name} took over")
            yield

    def close(self) -> None:
        """Stop here; the file stays, so that another attempt can go on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._store.has_ended(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def checksum_of_checksums(checksums: Sequence[int]) -> int:
    """One number for a sequence of blocks."""
    return checksum(b"".join(number.to_bytes(4, "little") for number in checksums))


@contextlib.contextmanager
def _translated(where: str, requested: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CapacityError(
                f"{where}: no room for {requested} bytes ({error.strerror})",
                requested=requested,
                available=_free_bytes(where),
            ) from error
        raise UnavailableError(f"{where}: {error.strerror}") from error


def _free_bytes(where: str) -> int:
    with contextlib.suppress(OSError):
        found = os.statvfs(Path(where).parent)
        return found.f_bavail * found.f_frsize
    return 0


def body_of(schema: SampleSchema, start: int, stop: int, samples: Any) -> memoryview:
    """Samples in memory, an array or a list of records, as the body of a segment."""
    if schema.dtype is None:
        records = [bytes(record) for record in samples]
        if len(records) != stop - start:
            raise InvalidInputError(f"{len(records)} records came for [{start}, {stop})")
        lengths = b"".join(len(record).to_bytes(8, "little") for record in records)
        return memoryview(lengths + b"".join(records))
    import numpy as np

    data = np.ascontiguousarray(samples, dtype=schema.dtype)
    expected = (stop - start, *schema.shape)
    if data.shape != expected:
        raise InvalidInputError(f"an array of shape {data.shape} came, expected {expected}")
    return memoryview(cast("Any", data.reshape(-1).view(np.uint8)))
