"""Sets of positions as sorted, disjoint ranges: cost depends on the number of ranges, not of positions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import chain
from operator import itemgetter

from tensorforge.errors import EncodingError, InvalidInputError

Range = tuple[int, int]
"""A half-open range `[start, stop)`."""


@dataclass(frozen=True, slots=True)
class IntervalSet:
    """A set of whole numbers from 0 up, stored as the fewest half-open ranges.

    `ranges` must be canonical: ascending, none empty, none adjacent to another. `IntervalSet.of` makes
    canonical ranges of any ranges.
    """

    ranges: tuple[Range, ...] = ()

    def __post_init__(self) -> None:
        last = -1
        for start, stop in self.ranges:
            if not last < start < stop:
                raise InvalidInputError(
                    f"ranges: [{start}, {stop}) must be non-empty and start above {last}"
                )
            last = stop

    @classmethod
    def of(cls, ranges: Iterable[Range]) -> IntervalSet:
        """The union of ranges in any order, which may overlap or be empty; a reversed range is an error."""
        return cls(tuple(_coalesce(sorted(ranges))))

    @classmethod
    def span(cls, stop: int, start: int = 0) -> IntervalSet:
        """All numbers in `[start, stop)`."""
        return cls.of([(start, stop)])

    @property
    def size(self) -> int:
        """How many numbers are in the set."""
        if len(self.ranges) == 1:
            start, stop = self.ranges[0]
            return stop - start
        return sum(stop - start for start, stop in self.ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __iter__(self) -> Iterator[Range]:
        return iter(self.ranges)

    def __len__(self) -> int:
        """How many ranges the set has."""
        return len(self.ranges)

    def __contains__(self, position: object) -> bool:
        if not isinstance(position, int):
            return False
        index = self._first_ending_after(position)
        return index < len(self.ranges) and self.ranges[index][0] <= position

    def next_gap(self, position: int) -> tuple[int, int | None]:
        """The first range at or after `position` that is not in the set; its stop is `None` if unbounded."""
        index = self._first_ending_after(position)
        if index < len(self.ranges) and self.ranges[index][0] <= position:
            position = self.ranges[index][1]
            index += 1
        return position, self.ranges[index][0] if index < len(self.ranges) else None

    def _first_ending_after(self, position: int) -> int:
        return bisect_right(self.ranges, position, key=itemgetter(1))

    def __or__(self, other: IntervalSet) -> IntervalSet:
        return IntervalSet(tuple(_coalesce(merge(self.ranges, other.ranges))))

    def __and__(self, other: IntervalSet) -> IntervalSet:
        if not self.ranges or other.covers(self.ranges[0][0], self.ranges[-1][1]):
            return self
        return IntervalSet(tuple(_intersect(self.ranges, other.ranges)))

    def __sub__(self, other: IntervalSet) -> IntervalSet:
        return IntervalSet(tuple(_subtract(self.ranges, other.ranges)))

    def isdisjoint(self, other: IntervalSet) -> bool:
        """Whether no number is in both sets."""
        return next(_intersect(self.ranges, other.ranges), None) is None

    def issuperset(self, other: IntervalSet) -> bool:
        """Whether every number of `other` is in this set."""
        return next(_subtract(other.ranges, self.ranges), None) is None

    def covers(self, start: int, stop: int) -> bool:
        """Whether all of `[start, stop)` is in the set."""
        if start >= stop:
            return True
        index = self._first_ending_after(start)
        if index == len(self.ranges):
            return False
        low, high = self.ranges[index]
        return low <= start and stop <= high

    def touches(self, start: int, stop: int) -> bool:
        """Whether any of `[start, stop)` is in the set."""
        index = self._first_ending_after(start)
        return start < stop and index < len(self.ranges) and self.ranges[index][0] < stop

    def first(self, count: int) -> IntervalSet:
        """The `count` smallest numbers, or all if there are fewer."""
        return self.split(count)[0]

    def split(self, count: int) -> tuple[IntervalSet, IntervalSet]:
        """The `count` smallest numbers, and the rest."""
        if count < 0:
            raise InvalidInputError(f"count = {count}: must not be negative")
        if count >= self.size:
            return self, NOTHING
        for index, (start, stop) in enumerate(self.ranges):
            if count < stop - start:
                cut = start + count
                head = ((start, cut),) if count else ()
                return (
                    IntervalSet(self.ranges[:index] + head),
                    IntervalSet(((cut, stop), *self.ranges[index + 1 :])),
                )
            count -= stop - start
        raise AssertionError("unreachable: count is below the size")

    def pack(self) -> bytes:
        """Encode the set in a few bytes: each gap and length as a variable-length number."""
        last, numbers = 0, []
        for start, stop in self.ranges:
            numbers += [start - last, stop - start]
            last = stop
        return pack_numbers(numbers)

    @classmethod
    def unpack(cls, data: bytes) -> IntervalSet:
        """Decode what `pack` encoded; anything else is an `EncodingError`."""
        numbers = unpack_numbers(data)
        if len(numbers) % 2:
            raise EncodingError("an interval set has a gap and a length for each range")
        last, ranges = 0, []
        for gap, length in zip(numbers[::2], numbers[1::2], strict=True):
            ranges.append((last + gap, last + gap + length))
            last += gap + length
        try:
            return cls(tuple(ranges))
        except InvalidInputError as error:
            raise EncodingError(f"not an interval set: {error}") from error

    def __str__(self) -> str:
        return " ".join(f"{start}-{stop}" for start, stop in self.ranges) or "nothing"


NOTHING = IntervalSet()


def union(sets: Iterable[IntervalSet]) -> IntervalSet:
    """The numbers that are in any of the sets."""
    return IntervalSet.of(chain.from_iterable(sets))


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """Encode whole numbers from 0 up, seven bits per byte, lowest first; a set high bit: more bytes follow."""
    packed = bytearray()
    for number in numbers:
        while number > 0x7F:
            packed.append(number & 0x7F | 0x80)
            number >>= 7
        packed.append(number)
    return bytes(packed)


def unpack_numbers(data: bytes) -> list[int]:
    """Decode what `pack_numbers` encoded; a truncated last number is an `EncodingError`."""
    numbers, number, shift = [], 0, 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number, shift = 0, 0
    if shift:
        raise EncodingError("the last number is truncated")
    return numbers


def _coalesce(ordered: Iterable[Range]) -> Iterator[Range]:
    low = high = -1
    for start, stop in ordered:
        if start < 0 or stop < start:
            raise InvalidInputError(f"[{start}, {stop}) is not a range of whole numbers from 0 up")
        if start == stop:
            continue
        if start <= high:
            high = max(high, stop)
            continue
        if high > low:
            yield low, high
        low, high = start, stop
    if high > low:
        yield low, high


def _intersect(left: tuple[Range, ...], right: tuple[Range, ...]) -> Iterator[Range]:
    i = j = 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            yield start, stop
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1


def _subtract(left: tuple[Range, ...], right: tuple[Range, ...]) -> Iterator[Range]:
    j = 0
    for start, stop in left:
        while j < len(right) and right[j][1] <= start:
            j += 1
        k = j
        while k < len(right) and right[k][0] < stop:
            if start < right[k][0]:
                yield start, right[k][0]
            start = max(start, right[k][1])
            k += 1
        if start < stop:
            yield start, stop
