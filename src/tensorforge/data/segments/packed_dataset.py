"""A complete data set as segments on a blob store: the origin that workers fetch shards from.

schema.json              the schema of a sample, and the size of the data set
segments/START-STOP.tfs  segments, as in a worker's shard store
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from tensorforge.data.plan.intervals import IntervalSet
from tensorforge.data.plan.order import ShuffledOrder
from tensorforge.data.plan.shards import partition
from tensorforge.data.segments.range_stream import RangeStream
from tensorforge.data.segments.samples import DatasetInfo, SampleSchema
from tensorforge.data.segments.segment import (
    BLOCK,
    Segment,
    checksum,
    encode_header,
    encode_table,
    find_segment,
    parse_name,
    segment_name,
)
from tensorforge.errors import EncodingError, InvalidInputError, NotFoundError
from tensorforge.storage.blobs import BlobStore

_SCHEMA, _SEGMENTS = "schema.json", "segments/"


class Origin(Protocol):
    """A source of every sample that does not depend on any worker."""

    def open_range(self, start: int, stop: int) -> RangeStream:
        """The samples `[start, stop)` as a byte stream."""
        ...


class PackedDataset:
    """A packed data set on a blob store: an `Origin`, and a map-style data set.

    A store without `schema.json` is a `NotFoundError`; a missing segment is an `EncodingError`.
    """

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        try:
            found = blobs.read(_SCHEMA)
        except NotFoundError:
            raise NotFoundError(
                f"{blobs.url} contains no packed data set: it has no {_SCHEMA}"
            ) from None
        self.info = DatasetInfo.from_json(found, f"{blobs.url}/{_SCHEMA}")
        names = [
            blob.key for blob in blobs.list(_SEGMENTS) if parse_name(blob.key.rpartition("/")[2])
        ]
        self._segments = [self._open(key) for key in names]
        held = IntervalSet.of((segment.start, segment.stop) for segment in self._segments)
        if held != IntervalSet.span(self.info.size):
            missing = IntervalSet.span(self.info.size) - held
            raise EncodingError(f"{blobs.url} lacks the samples {missing}")

    def _open(self, key: str) -> Segment:
        def read(offset: int, length: int) -> memoryview:
            buffer = memoryview(bytearray(length))
            self._blobs.read_into(key, offset, buffer)
            return buffer

        return Segment(key, self.info.schema, read, self._blobs.stat(key).size)

    def __len__(self) -> int:
        return self.info.size

    def __getitem__(self, index: int) -> Any:
        segment = find_segment(self._segments, index) if index >= 0 else None
        if segment is None:
            raise IndexError(f"sample {index} is not in [0, {self.info.size})")
        return self.info.schema.decode(segment.sample(index))

    def open_range(self, start: int, stop: int) -> RangeStream:
        """The samples `[start, stop)` as a byte stream."""
        if not 0 <= start <= stop <= self.info.size:
            raise InvalidInputError(f"[{start}, {stop}) is no range of [0, {self.info.size})")
        return RangeStream(self._segments, start, stop)

    def verify(self) -> None:
        """Compare every block with its checksum; `IntegrityError` names the first that differs."""
        for segment in self._segments:
            segment.verify()


def pack_array(
    blobs: BlobStore,
    samples: Any,
    *,
    segments: int = 64,
    shuffle_seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DatasetInfo:
    """Pack an array, such as a memory-mapped `.npy` file; its first dimension counts the samples.

    With `shuffle_seed` the samples are stored in a shuffled order. `progress` is called after each segment
    with the number of samples done and of all samples.
    """
    import numpy as np

    array = samples if isinstance(samples, np.ndarray) else np.asarray(samples)
    if array.ndim < 1:
        raise InvalidInputError("samples: a single number is not an array of samples")
    dtype = array.dtype.newbyteorder("<").str
    schema = SampleSchema(dtype=dtype, shape=tuple(array.shape[1:]))
    info = DatasetInfo(size=len(array), schema=schema)
    return _pack(blobs, info, segments, shuffle_seed, lambda indices: array[indices], progress)


def pack_records(
    blobs: BlobStore,
    records: Sequence[bytes],
    *,
    segments: int = 64,
    shuffle_seed: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DatasetInfo:
    """Pack byte strings of any length; the options are those of `pack_array`."""
    info = DatasetInfo(size=len(records), schema=SampleSchema())
    return _pack(
        blobs, info, segments, shuffle_seed, lambda indices: [records[i] for i in indices], progress
    )


def token_windows(tokens: Any, sample_length: int) -> Any:
    """Cut a sequence of tokens into samples of `sample_length`; a shorter rest at the end is dropped.

    The last token of a sample is also the first of the next one. So every token but the first is a target
    when inputs and targets are the sample without its last and without its first token.
    """
    import numpy as np

    stream = np.asarray(tokens)
    if stream.ndim != 1:
        raise InvalidInputError(f"tokens: expected one dimension, found {stream.ndim}")
    if sample_length < 2 or len(stream) < sample_length:
        raise InvalidInputError(
            f"sample_length = {sample_length}: must be at least 2 and at most {len(stream)} tokens"
        )
    windows = np.lib.stride_tricks.sliding_window_view(stream, sample_length)
    return windows[:: sample_length - 1]


def _pack(
    blobs: BlobStore,
    info: DatasetInfo,
    segments: int,
    shuffle_seed: int | None,
    fetch: Callable[[Any], Any],
    progress: Callable[[int, int], None] | None,
) -> DatasetInfo:
    """Write the segments, then the schema; a packed data set exists exactly if its schema does.

    The schema is written with `create`, so that of two concurrent packers only one succeeds.
    """
    order = None if shuffle_seed is None else ShuffledOrder(info.size, shuffle_seed)
    for shard in partition(info.size, min(segments, max(1, info.size))):
        indices: Any = range(shard.start_index, shard.end_index)
        if order is not None:
            indices = order.take(shard.start_index, shard.end_index)
        elif info.schema.dtype is not None:
            indices = slice(shard.start_index, shard.end_index)
        if shard.size:
            body = info.schema.encode_range(shard.start_index, shard.end_index, fetch(indices))
            key = _SEGMENTS + segment_name(shard.start_index, shard.end_index)
            blobs.write(key, _file_pieces(shard.start_index, shard.end_index, body))
        if progress is not None:
            progress(shard.end_index, info.size)
    blobs.create(_SCHEMA, info.to_json())
    return info


def _file_pieces(start: int, stop: int, body: memoryview) -> Iterator[bytes | memoryview]:
    yield encode_header(start, stop, len(body))
    checksums = []
    for offset in range(0, len(body), BLOCK):
        block = body[offset : offset + BLOCK]
        checksums.append(checksum(block))
        yield block
    yield encode_table(checksums)
