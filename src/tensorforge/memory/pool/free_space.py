"""The free ranges (holes) of an address space, indexed for exact best fit.

A bin is a heap with the offsets of all holes of one exact size, so its lowest offset is first. The sizes are
in short sorted lists, 32 to each power of two, and one bit of an integer per list says that it is not empty.
So finding the smallest sufficient hole is one bisection or one bit operation, whatever the number of holes.

Removed offsets stay in a heap for a while: an entry is valid only if a hole of exactly that size starts there.
A heap that has become mostly stale is rebuilt, and a heap without holes is dropped, so that the size of all
heaps stays proportional to the number of holes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from tensorforge.errors import ConflictError, InvalidInputError

_STALE_ALLOWED = 16


class FreeSpace:
    """The holes of `[0, capacity)`. Adjacent holes are always merged into one."""

    __slots__ = ("_bins", "_counts", "_filled", "_hole_at", "_hole_before", "_sizes", "free_bytes")

    def __init__(self, capacity: int) -> None:
        if capacity <= 0:
            raise InvalidInputError(f"capacity = {capacity}: must be positive")
        self._bins: dict[int, list[int]] = {}
        self._counts: dict[int, int] = {}
        self._sizes: dict[int, list[int]] = {}
        self._filled = 0
        self._hole_at: dict[int, int] = {}  # start → size
        self._hole_before: dict[int, int] = {}  # end → size
        self.free_bytes = 0
        self.give(0, capacity)

    @classmethod
    def around(cls, capacity: int, used: Iterable[tuple[int, int]]) -> FreeSpace:
        """The holes of `[0, capacity)` between the ranges `used`: pairs of offset and size, lowest first."""
        space = cls(capacity)
        del space._hole_at[0], space._hole_before[capacity]
        space._drop(0, capacity)
        space.free_bytes = cursor = 0
        for offset, size in (*used, (capacity, 0)):
            if offset < cursor:
                raise ConflictError(f"two ranges overlap at {offset}")
            if offset > cursor:
                space.give(cursor, offset - cursor)
            cursor = offset + size
        return space

    def __len__(self) -> int:
        """The number of holes."""
        return len(self._hole_at)

    def take(self, size: int, alignment: int = 1, *, from_top: bool = False) -> int | None:
        """Take `size` bytes from the smallest hole that has room and return their offset, or `None`.

        Among equal holes the lowest is taken. The range starts at the lowest multiple of `alignment` in
        the hole or, with `from_top`, at the highest that leaves room.
        """
        start = self._find(size, alignment)
        if start is None:
            return None
        hole = self._hole_at.pop(start)
        self._drop(start, hole)
        self.free_bytes -= size
        end = start + hole
        offset = (end - size if from_top else start + alignment - 1) & -alignment
        rest = end - offset - size
        if rest:
            self._hole_at[offset + size] = self._hole_before[end] = rest
            self._add(offset + size, rest)
        else:
            del self._hole_before[end]
        if offset != start:
            self._hole_at[start] = self._hole_before[offset] = offset - start
            self._add(start, offset - start)
        return offset

    def give(self, offset: int, size: int) -> None:
        """Free a range that was taken; it is merged with adjacent holes."""
        self.free_bytes += size
        end = offset + size
        above = self._hole_at.pop(end, 0)
        if above:
            self._drop(end, above)
            end += above
        below = self._hole_before.pop(offset, 0)
        if below:
            offset -= below
            self._drop(offset, below)
        size = end - offset
        self._hole_at[offset] = self._hole_before[end] = size
        self._add(offset, size)

    def largest(self) -> int:
        """The size of the largest hole; 0 if there is none."""
        if not self._filled:
            return 0
        return self._sizes[self._filled.bit_length() - 1][-1]

    def hole_at(self, start: int) -> int:
        """The size of the hole that starts at `start`; 0 if none does."""
        return self._hole_at.get(start, 0)

    def hole_before(self, end: int) -> int:
        """The size of the hole that ends at `end`; 0 if none does."""
        return self._hole_before.get(end, 0)

    def holes(self) -> list[tuple[int, int]]:
        """Offset and size of every hole, lowest first."""
        return sorted(self._hole_at.items())

    def _find(self, size: int, alignment: int) -> int | None:
        hole = self._smallest_from(size)
        while hole:
            heap, hole_at = self._bins[hole], self._hole_at
            while hole_at.get(heap[0]) != hole:
                heappop(heap)
            lowest = heap[0]
            if (-lowest & (alignment - 1)) + size <= hole:
                return lowest
            # Only holes that are larger than `size` by less than `alignment` get here.
            fitting = (
                start
                for start in heap
                if (-start & (alignment - 1)) + size <= hole and hole_at.get(start) == hole
            )
            start = min(fitting, default=None)
            if start is not None:
                return start
            hole = self._smallest_from(hole + 1)
        return None

    def _smallest_from(self, size: int) -> int:
        """The size of the smallest hole of at least `size`; 0 if there is none."""
        if size in self._bins:
            return size
        shift = size.bit_length() - 6
        index = size if shift <= 0 else (shift << 5) + (size >> shift)
        sizes = self._sizes.get(index)
        if sizes is not None and sizes[-1] >= size:
            return sizes[bisect_left(sizes, size)]
        above = self._filled >> index + 1
        if not above:
            return 0
        return self._sizes[index + (above & -above).bit_length()][0]

    def _add(self, start: int, size: int) -> None:
        """Add a hole to the bin of its size."""
        heap = self._bins.get(size)
        if heap is not None:
            heappush(heap, start)
            self._counts[size] += 1
            return
        self._bins[size] = [start]
        self._counts[size] = 1
        index = _size_class(size)
        sizes = self._sizes.get(index)
        if sizes is not None:
            insort(sizes, size)
            return
        self._sizes[index] = [size]
        self._filled |= 1 << index

    def _drop(self, start: int, size: int) -> None:
        """Remove a hole from the bin of its size; its entry in the heap may stay and become stale."""
        left = self._counts[size] - 1
        if left:
            self._counts[size] = left
            heap = self._bins[size]
            if heap[0] == start:
                heappop(heap)
            elif len(heap) > 2 * left + _STALE_ALLOWED:
                self._bins[size] = self._rebuilt(heap, size)
            return
        del self._counts[size], self._bins[size]
        index = _size_class(size)
        sizes = self._sizes[index]
        if len(sizes) > 1:
            del sizes[bisect_left(sizes, size)]
            return
        del self._sizes[index]
        self._filled ^= 1 << index

    def _rebuilt(self, heap: list[int], size: int) -> list[int]:
        fresh = [start for start in set(heap) if self._hole_at.get(start) == size]
        heapify(fresh)
        return fresh


def _size_class(size: int) -> int:
    """The number of a size's list: one per size below 64, then 32 per power of two."""
    shift = size.bit_length() - 6
    if shift <= 0:
        return size
    return (shift << 5) + (size >> shift)
