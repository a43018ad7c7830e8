"""A range of samples as a byte stream: the body that the range has, or would have, as one segment."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tensorforge.data.segments.segment import BLOCK, Segment, block_count, checksum, find_segment
from tensorforge.errors import NotFoundError


@dataclass(frozen=True, slots=True)
class _Piece:
    """Contiguous bytes of the stream: bytes of one segment, or, without a segment, `data`."""

    offset: int
    length: int
    segment: Segment | None
    segment_offset: int
    data: bytes = b""


class RangeStream:
    """The samples `[start, stop)`, read from the segments that contain them.

    `segments` must be sorted by their starts. The stream of exactly one segment's range is its body.
    """

    def __init__(self, segments: Sequence[Segment], start: int, stop: int) -> None:
        parts = list(_parts(list(segments), start, stop))
        self._pieces: list[_Piece] = []
        self.body_bytes = 0
        if len(parts) == 1 and (parts[0][0].start, parts[0][0].stop) == (start, stop):
            segment = parts[0][0]
            self._add(segment.body_bytes, segment, 0)
        else:
            lengths = b"".join(segment.lengths(low, high) for segment, low, high in parts)
            if lengths:
                self._add(len(lengths), None, 0, lengths)
            for segment, low, high in parts:
                offset, length = segment.sample_range(low, high)
                if length:
                    self._add(length, segment, offset)
        self._offsets = [piece.offset for piece in self._pieces]

    def _add(self, length: int, segment: Segment | None, offset: int, data: bytes = b"") -> None:
        self._pieces.append(_Piece(self.body_bytes, length, segment, offset, data))
        self.body_bytes += length

    @property
    def blocks(self) -> int:
        """How many chunks the stream has."""
        return block_count(self.body_bytes)

    def chunk(self, number: int) -> tuple[memoryview, int]:
        """One chunk to send, and its checksum.

        If the chunk is a block of a segment, these are the stored bytes and the recorded checksum; the
        receiver compares them. Otherwise the chunk is composed of verified bytes and its checksum is new.
        """
        source = self._block_of(number)
        if source is None:
            block = self.block(number)
            return block, checksum(block)
        segment, index = source
        return segment.stored_block(index), segment.recorded_checksum(index)

    def block(self, number: int) -> memoryview:
        """The verified bytes of one chunk."""
        return self.read(number * BLOCK, min(BLOCK, self.body_bytes - number * BLOCK))

    def block_checksum(self, number: int) -> int:
        """The checksum of one chunk: the recorded one if the chunk is a block of a segment."""
        source = self._block_of(number)
        if source is None:
            return checksum(self.block(number))
        segment, index = source
        return segment.recorded_checksum(index)

    def _block_of(self, number: int) -> tuple[Segment, int] | None:
        """The segment and block number of a chunk that is exactly one block; otherwise `None`."""
        offset = number * BLOCK
        length = min(BLOCK, self.body_bytes - offset)
        piece = self._pieces[bisect_right(self._offsets, offset) - 1]
        at = piece.segment_offset + offset - piece.offset
        if piece.segment is None or at % BLOCK or offset + length > piece.offset + piece.length:
            return None
        if length < BLOCK and at + length != piece.segment.body_bytes:
            return None
        return piece.segment, at // BLOCK

    def read(self, offset: int, length: int) -> memoryview:
        """Verified bytes of the stream; they are copied only if they come from several pieces."""
        found: list[memoryview] = []
        index = bisect_right(self._offsets, offset) - 1
        while length:
            piece = self._pieces[index]
            within = offset - piece.offset
            count = min(length, piece.length - within)
            if piece.segment is None:
                found.append(memoryview(piece.data)[within : within + count])
            else:
                found.append(piece.segment.body(piece.segment_offset + within, count))
            offset, length, index = offset + count, length - count, index + 1
        return found[0] if len(found) == 1 else memoryview(b"".join(found))


def _parts(segments: list[Segment], start: int, stop: int) -> list[tuple[Segment, int, int]]:
    parts = []
    for segment in segments:
        if (segment.start, segment.stop) == (start, stop):
            return [(segment, start, stop)]
    while start < stop:
        found = find_segment(segments, start)
        if found is None:
            raise NotFoundError(f"no segment contains sample {start}")
        end = min(stop, found.stop)
        parts.append((found, start, end))
        start = end
    return parts
