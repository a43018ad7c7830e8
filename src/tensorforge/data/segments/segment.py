"""The file format of shards: a segment is one file with a contiguous range of samples and checksums.

    offset 0      header   64 bytes: magic, first sample, end, body bytes, block bytes, CRC-32C of these
    offset 64     body     for records: the length of each as 8 bytes; then the samples, one after the other
    after body    table    CRC-32C of each block of the body, 4 bytes each, and of the table itself

All numbers are little-endian. A transfer of the segment's range sends exactly the body, and one block of
the body is one chunk on the wire. So the checksum computed when the data was packed is the one that every
later receiver compares. `docs/shard-store.md` has the details.
"""

from __future__ import annotations

import re
import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Final, cast

import crc32c

from tensorforge.data.segments.samples import SampleSchema
from tensorforge.errors import EncodingError, IntegrityError

BLOCK: Final = 1 << 20
"""Bytes per block of a body and per chunk on the wire."""

HEADER: Final = struct.Struct("<8sQQQII24x")
_MAGIC: Final = b"TFSEG\x00\x00\x01"
_CHECKED: Final = struct.Struct("<8sQQQI")
_NAME: Final = re.compile(r"(\d{15})-(\d{15})\.tfs")

ReadRange = Callable[[int, int], memoryview]
"""Reads exactly `length` bytes of a file from `offset` on."""


def checksum(data: bytes | bytearray | memoryview) -> int:
    """The CRC-32C of `data`."""
    return crc32c.crc32c(data)


def checksum_of_checksums(checksums: Sequence[int]) -> int:
    """One checksum for a sequence of blocks, computed from the checksum of each."""
    return checksum(b"".join(number.to_bytes(4, "little") for number in checksums))


def segment_name(start: int, stop: int) -> str:
    """The file name of the segment for `[start, stop)`; names sort in the order of the ranges."""
    return f"{start:015}-{stop:015}.tfs"


def parse_name(name: str) -> tuple[int, int] | None:
    """The range that a segment's file name states, or `None` if the name is not a segment's."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def encode_header(start: int, stop: int, body_bytes: int) -> bytes:
    """The first 64 bytes of a segment."""
    checked = _CHECKED.pack(_MAGIC, start, stop, body_bytes, BLOCK)
    return HEADER.pack(_MAGIC, start, stop, body_bytes, BLOCK, checksum(checked))


def encode_table(checksums: Iterable[int]) -> bytes:
    """The table of checksums that follows the body."""
    table = _little_endian(array("I", checksums))
    return table + checksum(table).to_bytes(4, "little")


def block_count(body_bytes: int) -> int:
    """How many blocks a body has."""
    return -(-body_bytes // BLOCK)


def file_bytes(body_bytes: int) -> int:
    """How large the file of a segment with such a body is."""
    return HEADER.size + body_bytes + 4 * block_count(body_bytes) + 4


class Segment:
    """A segment opened for reading. `body` returns only bytes that match their checksums.

    `read` reads from the file, which may be mapped memory or a blob; `size` is the file's size. A file
    that is not a segment or was truncated is an `EncodingError`; changed bytes are an `IntegrityError`.
    """

    def __init__(self, name: str, schema: SampleSchema, read: ReadRange, size: int) -> None:
        self.name, self.schema, self._read = name, schema, read
        if size < HEADER.size + 4:
            raise EncodingError(f"{name}: {size} bytes are too few for a segment")
        fields = HEADER.unpack(read(0, HEADER.size))
        magic, self.start, self.stop, self.body_bytes, block, found = fields
        if magic != _MAGIC or block != BLOCK:
            raise EncodingError(f"{name}: not a segment of a known version")
        if checksum(_CHECKED.pack(magic, self.start, self.stop, self.body_bytes, block)) != found:
            raise IntegrityError(f"{name}: the header is damaged")
        if self.start > self.stop or size != file_bytes(self.body_bytes):
            raise EncodingError(f"{name}: {size} bytes, expected {file_bytes(self.body_bytes)}")
        self._checksums = self._load_table()
        self._verified = bytearray(len(self._checksums))
        self._ends = self._load_ends()

    def _load_table(self) -> array[int]:
        length = 4 * block_count(self.body_bytes)
        data = self._read(HEADER.size + self.body_bytes, length + 4)
        if checksum(data[:length]) != int.from_bytes(data[length:], "little"):
            raise IntegrityError(f"{self.name}: the table of checksums is damaged")
        return _from_little_endian("I", data[:length])

    def _load_ends(self) -> list[int] | None:
        """Where each record ends in the body; `None` if all samples have the same size."""
        count, sample_bytes = self.stop - self.start, self.schema.sample_bytes
        if sample_bytes is not None:
            if self.body_bytes != count * sample_bytes:
                raise EncodingError(
                    f"{self.name}: {count} samples of {sample_bytes} bytes do not make {self.body_bytes}"
                )
            return None
        if self.body_bytes < 8 * count:
            raise EncodingError(f"{self.name}: too short for the lengths of {count} records")
        lengths = _from_little_endian("Q", self.body(0, 8 * count))
        ends = list(accumulate(lengths, initial=8 * count))
        if ends[-1] != self.body_bytes:
            raise EncodingError(f"{self.name}: the records' lengths do not add up to the body")
        return ends

    def body(self, offset: int, length: int) -> memoryview:
        """Bytes of the body, verified: each block is compared with its checksum when first read."""
        if not length:
            return memoryview(b"")
        first, end = offset // BLOCK, block_count(offset + length)
        low, high = first * BLOCK, min(end * BLOCK, self.body_bytes)
        data = self._read(HEADER.size + low, high - low)
        for number in range(first, end):
            if not self._verified[number]:
                block = data[number * BLOCK - low : (number + 1) * BLOCK - low]
                if checksum(block) != self._checksums[number]:
                    raise IntegrityError(f"{self.name}: block {number} is damaged")
                self._verified[number] = 1
        return data[offset - low : offset - low + length]

    def verify(self) -> None:
        """Compare every block with its checksum; `IntegrityError` names the first that differs."""
        for offset in range(0, self.body_bytes, BLOCK):
            self.body(offset, min(BLOCK, self.body_bytes - offset))

    def recorded_checksum(self, block: int) -> int:
        """The checksum of a block, from the table."""
        return self._checksums[block]

    def stored_block(self, block: int) -> memoryview:
        """A block's bytes without verification, for a receiver that compares the checksum itself."""
        low = block * BLOCK
        return self._read(HEADER.size + low, min(BLOCK, self.body_bytes - low))

    def sample_range(self, start: int, stop: int) -> tuple[int, int]:
        """Offset and length in the body of the bytes of the samples `[start, stop)`."""
        low, high = self._offset(start - self.start), self._offset(stop - self.start)
        return low, high - low

    def lengths(self, start: int, stop: int) -> bytes:
        """The encoded lengths of the records `[start, stop)`; empty if the samples are arrays."""
        if self._ends is None:
            return b""
        return bytes(self.body(8 * (start - self.start), 8 * (stop - start)))

    def sample(self, index: int) -> memoryview:
        """The bytes of one sample."""
        return self.body(*self.sample_range(index, index + 1))

    def _offset(self, number: int) -> int:
        if self._ends is None:
            return number * cast("int", self.schema.sample_bytes)
        return self._ends[number]


def find_segment(segments: list[Segment], index: int) -> Segment | None:
    """The segment that contains sample `index`; `segments` must be sorted by their starts.

    If several contain it, the one that starts last: overlapping segments contain equal samples.
    """
    at = bisect_right(segments, index, key=lambda segment: segment.start) - 1
    while at >= 0:
        if segments[at].stop > index:
            return segments[at]
        at -= 1
    return None


def _little_endian(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values.tobytes()


def _from_little_endian(typecode: str, data: memoryview) -> array[int]:
    values: array[int] = array(typecode)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
