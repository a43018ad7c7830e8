"""Placement policies, to be compared on the same trace.

An online policy sees one request at a time and returns an offset. Its address space is unbounded; `reserved` is
the largest extent that it has used, which is the size that a pool with this policy needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tensorforge.errors import NotFoundError
from tensorforge.memory.pool.free_space import FreeSpace

UNBOUNDED = 1 << 60
SMALL_BLOCK = 16 << 10
GRANULARITY = 512


class Policy(Protocol):
    """Places blocks. A block is freed with its offset and the size of its request."""

    @property
    def reserved(self) -> int:
        """The bytes that this policy has needed so far."""

    def allocate(self, size: int) -> int:
        """Place a new block and return its offset."""

    def free(self, offset: int, size: int) -> None:
        """Free a block."""


class BestFit:
    """The policy of `MemoryPool`: the smallest hole that fits, the lowest among equals.

    With `small_block`, smaller requests go to the top end of the address space: two-ended best fit.
    """

    def __init__(self, small_block: int = 0) -> None:
        self._space = FreeSpace(UNBOUNDED)
        self._small_block = small_block
        self._low = self._high = 0

    @property
    def reserved(self) -> int:
        """The extent used from the bottom plus the extent used from the top."""
        return self._low + self._high

    def allocate(self, size: int) -> int:
        """Place a block at the low end of its hole, a small one at the high end."""
        nbytes = _rounded(size)
        offset = self._space.take(nbytes, from_top=nbytes < self._small_block)
        assert offset is not None, "an unbounded space has room"  # noqa: S101
        if offset < UNBOUNDED // 2:
            self._low = max(self._low, offset + nbytes)
        else:
            self._high = max(self._high, UNBOUNDED - offset)
        return offset

    def free(self, offset: int, size: int) -> None:
        """Free a block and merge it with adjacent holes."""
        self._space.give(offset, _rounded(size))


class FirstFit:
    """The lowest hole that fits, found by linear search."""

    def __init__(self) -> None:
        self._holes: list[tuple[int, int]] = [(0, UNBOUNDED)]
        self.reserved = 0

    def allocate(self, size: int) -> int:
        """Place a block at the start of the lowest hole with room."""
        nbytes = _rounded(size)
        index = next(i for i, (_, hole) in enumerate(self._holes) if hole >= nbytes)
        offset, hole = self._holes[index]
        self._holes[index : index + 1] = [(offset + nbytes, hole - nbytes)] if hole > nbytes else []
        self.reserved = max(self.reserved, offset + nbytes)
        return offset

    def free(self, offset: int, size: int) -> None:
        """Free a block and merge it with adjacent holes."""
        end = offset + _rounded(size)
        index = next((i for i, (start, _) in enumerate(self._holes) if start >= end), None)
        index = len(self._holes) if index is None else index
        first = last = index
        if index < len(self._holes) and self._holes[index][0] == end:
            end += self._holes[index][1]
            last += 1
        if index and sum(self._holes[index - 1]) == offset:
            first -= 1
            offset = self._holes[first][0]
        self._holes[first:last] = [(offset, end - offset)]


class TwoLevelSegregatedFit:
    """TLSF: the newest hole of the first non-empty size class in which every hole is large enough.

    There are 32 classes per power of two. It takes constant time, but does not find the smallest hole.
    """

    def __init__(self) -> None:
        self._classes: dict[int, dict[int, None]] = {}
        self._filled = 0
        self._hole_at: dict[int, int] = {}
        self._hole_before: dict[int, int] = {}
        self.reserved = 0
        self._insert(0, UNBOUNDED)

    def allocate(self, size: int) -> int:
        """Place a block at the start of the newest hole of the class."""
        nbytes = _rounded(size)
        above = self._filled >> _class_above(nbytes)
        index = _class_above(nbytes) + (above & -above).bit_length() - 1
        offset = next(reversed(self._classes[index]))
        hole = self._hole_at[offset]
        self._remove(offset)
        if hole > nbytes:
            self._insert(offset + nbytes, hole - nbytes)
        self.reserved = max(self.reserved, offset + nbytes)
        return offset

    def free(self, offset: int, size: int) -> None:
        """Free a block and merge it with adjacent holes."""
        end = offset + _rounded(size)
        if end in self._hole_at:
            above = self._hole_at[end]
            self._remove(end)
            end += above
        if offset in self._hole_before:
            offset -= self._hole_before[offset]
            self._remove(offset)
        self._insert(offset, end - offset)

    def _insert(self, offset: int, size: int) -> None:
        self._hole_at[offset] = self._hole_before[offset + size] = size
        index = _class_below(size)
        self._classes.setdefault(index, {})[offset] = None
        self._filled |= 1 << index

    def _remove(self, offset: int) -> None:
        size = self._hole_at.pop(offset)
        del self._hole_before[offset + size]
        index = _class_below(size)
        del self._classes[index][offset]
        if not self._classes[index]:
            self._filled &= ~(1 << index)


class CachingSegments:
    """The rules of PyTorch's caching allocator on CUDA, without its memory limit.

    Blocks of up to 1 MiB come from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones from a
    segment of their own, rounded to 2 MiB. Segments are never given back; a large block is split only if more
    than 1 MiB is left.
    """

    _SMALL = 1 << 20
    _MEDIUM = 10 << 20

    def __init__(self) -> None:
        self._pools = {True: _Segments(), False: _Segments()}
        self._extra: dict[int, int] = {}
        self.reserved = 0

    def allocate(self, size: int) -> int:
        """Place a block in the smallest free piece of its pool, or in a new segment."""
        nbytes = _rounded(size)
        small = nbytes <= self._SMALL
        segments = self._pools[small]
        piece = segments.smallest_from(nbytes)
        if piece is None:
            piece = (self.reserved, self._segment_size(nbytes))
            segments.add_segment(*piece)
            self.reserved += piece[1]
        rest = piece[1] - nbytes
        splits = rest >= GRANULARITY if small else rest > self._SMALL
        taken = nbytes if splits else piece[1]
        segments.take(piece, taken)
        self._extra[piece[0]] = taken
        return piece[0]

    def free(self, offset: int, size: int) -> None:
        """Return a block to its segment."""
        taken = self._extra.pop(offset)
        self._pools[_rounded(size) <= self._SMALL].give(offset, taken)

    def _segment_size(self, nbytes: int) -> int:
        if nbytes <= self._SMALL:
            return 2 << 20
        if nbytes < self._MEDIUM:
            return 20 << 20
        return -(-nbytes // (2 << 20)) * (2 << 20)


class _Segments:
    """Free pieces that merge with adjacent ones, but never across the end of a segment."""

    def __init__(self) -> None:
        self._pieces: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._borders: set[int] = set()

    def add_segment(self, offset: int, size: int) -> None:
        self._borders.update((offset, offset + size))
        self._put(offset, size)

    def smallest_from(self, nbytes: int) -> tuple[int, int] | None:
        fitting = [(size, offset) for offset, size in self._pieces.items() if size >= nbytes]
        size, offset = min(fitting, default=(0, 0))
        return (offset, size) if size else None

    def take(self, piece: tuple[int, int], nbytes: int) -> None:
        offset, size = piece
        del self._pieces[offset], self._ends[offset + size]
        if size > nbytes:
            self._put(offset + nbytes, size - nbytes)

    def give(self, offset: int, size: int) -> None:
        end = offset + size
        if end in self._pieces and end not in self._borders:
            above = self._pieces.pop(end)
            end += above
            del self._ends[end]
        if offset in self._ends and offset not in self._borders:
            below = self._ends.pop(offset)
            del self._pieces[below]
            offset = below
        self._put(offset, end - offset)

    def _put(self, offset: int, size: int) -> None:
        self._pieces[offset] = size
        self._ends[offset + size] = offset


ONLINE: dict[str, Callable[[], Policy]] = {
    "best-fit": BestFit,
    "two-ended": lambda: BestFit(small_block=SMALL_BLOCK),
    "first-fit": FirstFit,
    "tlsf": TwoLevelSegregatedFit,
    "pytorch-like": CachingSegments,
}
"""The online policies by name; the first is the policy of `MemoryPool`."""

OFFLINE = "offline"
"""The name of the planner that knows the complete trace in advance."""

POLICY_NAMES = (*ONLINE, OFFLINE)


def online_policy(name: str) -> Policy:
    """A new policy of this name; an unknown name is a `NotFoundError` that lists the known ones."""
    if name not in ONLINE:
        raise NotFoundError(f"no policy is named {name!r}; known are {', '.join(POLICY_NAMES)}")
    return ONLINE[name]()


def _rounded(size: int) -> int:
    return -(-size // GRANULARITY) * GRANULARITY


def _class_below(size: int) -> int:
    """The class of a hole: rounded down."""
    shift = max(0, size.bit_length() - 6)
    return (shift << 5) + (size >> shift)


def _class_above(size: int) -> int:
    """The first class in which every hole has at least `size`."""
    shift = max(0, size.bit_length() - 6)
    return _class_below(size + (1 << shift) - 1)
