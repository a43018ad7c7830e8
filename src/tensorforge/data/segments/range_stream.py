"""A range of samples as the bytes that travel: the body of the segment that it will be elsewhere."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tensorforge.data.segments.segment import BLOCK, Segment, block_count, checksum, find_segment
from tensorforge.errors import NotFoundError


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring bytes of the stream that lie next to each other in a segment."""

    offset: int
    length: int
    segment: Segment | None
    segment_offset: int
    data: bytes = b""


class RangeStream:
    """The samples `[start, stop)`, cut out of the segments that hold them.

    `segments` are in order of their starts. The stream of a whole segment is its body.
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

        A chunk that is also a block of a segment is given as it lies there, not verified, with the checksum
        that was recorded: the receiver compares them. Any other is cut out of verified bytes.
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
        """The checksum of one chunk: the recorded one where there is one."""
        source = self._block_of(number)
        if source is None:
            return checksum(self.block(number))
        segment, index = source
        return segment.recorded_checksum(index)

    def _block_of(self, number: int) -> tuple[Segment, int] | None:
        """The segment and its block that a chunk is, if it is one."""
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
        """Verified bytes of the stream, copied only where they lie apart."""
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
            raise NotFoundError(f"sample {start} is in none of the segments")
        end = min(stop, found.stop)
        parts.append((found, start, end))
        start = end
    return parts
