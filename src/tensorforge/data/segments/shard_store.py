"""The shards that one worker stores: a folder of segments.

    folder/schema.json               the schema of a sample, and the size of the data set
    folder/segments/START-STOP.tfs   the ranges stored here
    folder/incoming/START-STOP.part  a range being received; the blocks in it are verified

The folder's listing is the only index, so no index can differ from the files. Files are not synced to
disk, because each is a copy; the checksums detect a segment that a power failure damaged.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tensorforge.data.plan.intervals import IntervalSet
from tensorforge.data.segments.part_file import PartFile, part_name, translated
from tensorforge.data.segments.range_stream import RangeStream
from tensorforge.data.segments.samples import DatasetInfo, SampleSchema
from tensorforge.data.segments.segment import BLOCK, Segment, find_segment, parse_name
from tensorforge.errors import (
    ClosedError,
    ConflictError,
    EncodingError,
    InvalidInputError,
    NotFoundError,
)


class ShardStore:
    """The segments in a local folder: a map-style data set of the samples that are stored here.

    Safe to share between threads. With `info` a missing folder is created; an existing folder that
    describes another data set is a `ConflictError`.
    """

    def __init__(self, folder: str | Path, info: DatasetInfo | None = None) -> None:
        self.folder = Path(folder)
        self._lock = threading.RLock()
        self._segments: list[Segment] = []
        self._opened: dict[str, Segment] = {}
        self._arriving: dict[tuple[int, int], PartFile] = {}
        self._closed = False
        self.info = self._open_folder(info)
        self.refresh()

    def _open_folder(self, info: DatasetInfo | None) -> DatasetInfo:
        path = self.folder / "schema.json"
        if path.exists():
            found = DatasetInfo.from_json(path.read_bytes(), str(path))
            if info is not None and info != found:
                raise ConflictError(f"{self.folder} contains another data set: {found}, not {info}")
            return found
        if info is None:
            raise NotFoundError(f"{self.folder} is not a shard store: it has no schema.json")
        with translated(str(self.folder)):
            for name in ("segments", "incoming"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            fresh = self.folder / f"schema.json.{os.getpid()}"
            fresh.write_bytes(info.to_json())
            fresh.replace(path)
        return info

    def refresh(self) -> None:
        """Open segments that were added to the folder, and forget those that were deleted."""
        with self._lock:
            self._check_open()
            names = {p.name for p in (self.folder / "segments").iterdir() if parse_name(p.name)}
            for name in set(self._opened) - names:
                del self._opened[name]
            for name in names - set(self._opened):
                self._opened[name] = _map_segment(self.folder / "segments" / name, self.info.schema)
            self._segments = sorted(self._opened.values(), key=lambda s: (s.start, s.stop))

    @property
    def held(self) -> IntervalSet:
        """The samples that are stored here."""
        return IntervalSet.of((segment.start, segment.stop) for segment in self._segments)

    def __len__(self) -> int:
        """How many samples the data set has, stored here or not."""
        return self.info.size

    def __getitem__(self, index: int) -> Any:
        """One sample; `NotFoundError` if it is not stored here."""
        return self.info.schema.decode(self._segment_of(index).sample(index))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples; torch's `DataLoader` calls this once per batch."""
        return [self[index] for index in indices]

    def _segment_of(self, index: int) -> Segment:
        segment = find_segment(self._segments, index)
        if segment is None:
            if not 0 <= index < self.info.size:
                raise IndexError(f"sample {index} is not in [0, {self.info.size})")
            raise NotFoundError(
                f"sample {index} is not stored in {self.folder}: fetch its shard first"
            )
        return segment

    def open_range(self, start: int, stop: int) -> RangeStream:
        """The samples `[start, stop)` as a byte stream; `NotFoundError` unless all are stored here."""
        if not self.held.covers(start, stop):
            missing = IntervalSet.span(stop, start) - self.held
            raise NotFoundError(f"{self.folder} does not contain the samples {missing}")
        return RangeStream(self._segments, start, stop)

    def put(self, start: int, stop: int, samples: Any) -> None:
        """Store samples from memory: an array, or a list of records."""
        body = self.info.schema.encode_range(start, stop, samples)
        with self.receive(start, stop) as part:
            part.begin(len(body))
            part.restart()
            for offset in range(0, len(body), BLOCK):
                part.append(body[offset : offset + BLOCK])
            part.commit()

    def receive(self, start: int, stop: int) -> PartFile:
        """Open the part file of a range, with the blocks that an earlier attempt received.

        An earlier attempt at the same range that is still running can no longer write.
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

    def forget_part(self, part: PartFile) -> None:
        """Note that `part` was closed; `PartFile.close` calls this."""
        with self._lock:
            if self._arriving.get((part.start, part.stop)) is part:
                del self._arriving[part.start, part.stop]

    def release(self, keep: IntervalSet) -> IntervalSet:
        """Delete the segments that contain no sample of `keep`, and return the samples removed."""
        with self._lock:
            before = self.held
            for segment in self._segments:
                if not keep.touches(segment.start, segment.stop):
                    (self.folder / "segments" / segment.name).unlink(missing_ok=True)
            self.refresh()
            return before - self.held

    def drop(self, index: int) -> None:
        """Delete the segment that contains sample `index`, because it is damaged."""
        with self._lock:
            segment = find_segment(self._segments, index)
            if segment is not None:
                (self.folder / "segments" / segment.name).unlink(missing_ok=True)
                self.refresh()

    def clear_incoming(self, keep: Sequence[tuple[int, int]] = ()) -> None:
        """Delete every part file except those of the ranges in `keep`, which are still being fetched."""
        wanted = {part_name(start, stop) for start, stop in keep}
        for path in (self.folder / "incoming").iterdir():
            if path.name not in wanted:
                path.unlink(missing_ok=True)

    def verify(self) -> None:
        """Compare every block with its checksum; `IntegrityError` names the first that differs."""
        for segment in list(self._segments):
            segment.verify()

    def close(self) -> None:
        """Close the files; closing again changes nothing."""
        with self._lock:
            self._closed = True
            self._segments = []
            self._opened = {}

    def __reduce__(self) -> tuple[type[ShardStore], tuple[Path]]:
        """Pickle as the folder: another process, such as a loader's worker, opens it again."""
        return ShardStore, (self.folder,)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the shard store {self.folder} was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _map_segment(path: Path, schema: SampleSchema) -> Segment:
    """Open a segment whose file stays mapped as long as the segment or a view of its bytes exists."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise EncodingError(f"{path.name}: the file is empty")
        view = memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))
    return Segment(path.name, schema, lambda offset, length: view[offset : offset + length], size)
