"""Geometry of tensors that lie in pieces: boxes of indices, their overlaps, what they add up to."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tensorforge.errors import InvalidInputError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The indices from `offset` on, `shape` many along each dimension; a scalar's box is `Box((), ())`."""

    offset: Shape
    shape: Shape

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise InvalidInputError(f"offset {self.offset} and shape {self.shape} differ in length")
        if self.shape and (min(self.offset) < 0 or min(self.shape) < 0):
            raise InvalidInputError(f"a box has no negative numbers: {self.offset}, {self.shape}")

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> Shape:
        """One past the last index along each dimension."""
        return tuple(map(operator.add, self.offset, self.shape))

    @property
    def size(self) -> int:
        """How many elements the box holds."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """What both boxes hold, or `None` if that is nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        shape = tuple(map(operator.sub, map(min, self.stop, other.stop), starts))
        return Box(starts, shape) if min(shape, default=1) > 0 else None

    def contains(self, other: Box) -> bool:
        """Whether all of `other` lies inside."""
        return all(
            a <= c and d <= b
            for a, b, c, d in zip(self.offset, self.stop, other.offset, other.stop, strict=True)
        )

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """How to index this box in an array that holds `outer`."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.offset, outer.offset, self.shape, strict=True)
        )

    def run_in(self, outer: Box) -> int | None:
        """Where this box begins in `outer`'s elements, if it is one run of them, else `None`."""
        position, stride, must_be_single = 0, 1, False
        dimensions = zip(self.offset, self.shape, outer.offset, outer.shape, strict=True)
        for start, size, base, extent in reversed(list(dimensions)):
            if must_be_single and size != 1:
                return None
            if size != extent:
                must_be_single = True
            position += (start - base) * stride
            stride *= extent
        return position


def split(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box into runs of its own elements, in order, of at most `limit` elements each.

    The runs are as equal as may be: whoever wants half of the box later finds a cut near its middle.
    """
    if box.size <= limit:
        if box.size:
            yield box
        return
    extent = next(size for size in box.shape if size > 1)
    rows = max(1, limit * extent // box.size)
    for part in share(box, -(-extent // rows)):
        yield from split(part, limit)


def slab(box: Box, axis: int, start: int, count: int) -> Box:
    """The part of a box from `start` on, `count` long, along one dimension."""
    offset, shape = list(box.offset), list(box.shape)
    offset[axis] += start
    shape[axis] = count
    return Box(tuple(offset), tuple(shape))


def share(box: Box, parts: int) -> list[Box]:
    """Cut a box into `parts` slabs along its first dimension that has room; some may be missing."""
    axis = next((index for index, size in enumerate(box.shape) if size > 1), None)
    if axis is None:
        return [box]
    extent = box.shape[axis]
    cuts = [extent * index // parts for index in range(parts + 1)]
    return [slab(box, axis, a, b - a) for a, b in itertools.pairwise(cuts) if b > a]


def check_partition(shape: Shape, boxes: Iterable[Box], what: str) -> None:
    """Raise `InvalidInputError` unless the boxes are disjoint and add up to a tensor of `shape`."""
    whole = Box.whole(shape)
    filled = [box for box in boxes if box.size]
    if _is_stack(whole, filled):
        return
    for box in filled:
        if len(box.shape) != len(shape) or not whole.contains(box):
            raise InvalidInputError(f"{what}: {box} lies outside of shape {shape}")
    overlap = find_overlap(filled)
    if overlap:
        raise InvalidInputError(f"{what}: {overlap[0]} and {overlap[1]} overlap")
    missing = whole.size - sum(box.size for box in filled)
    if missing:
        raise InvalidInputError(f"{what}: {missing} of {whole.size} elements are missing")


def _is_stack(whole: Box, boxes: list[Box]) -> bool:
    """Whether the boxes are slabs of a tensor, one behind the other from its first row to its last.

    Most tensors are cut in this way, and seeing it takes far less time than a sweep.
    """
    if not whole.shape or not boxes:
        return False
    inner, row, reached = whole.offset[1:], whole.shape[1:], 0
    for box in boxes:
        if not box.shape or box.shape[1:] != row or box.offset != (reached, *inner):
            return False
        reached += box.shape[0]
    return reached == whole.shape[0]


def find_overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, if there are any.

    A sweep along the dimension that the boxes are cut most finely in, so that pieces of a large cluster
    are compared with their neighbours only.
    """
    if len(boxes) < 2 or not boxes[0].shape:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    axis = max(range(len(boxes[0].shape)), key=lambda d: len({box.offset[d] for box in boxes}))
    active: list[tuple[int, int]] = []  # (where it stops, index), soonest first
    order = sorted(range(len(boxes)), key=lambda index: boxes[index].offset[axis])
    for index in order:
        box = boxes[index]
        done = bisect.bisect_right(active, (box.offset[axis], len(boxes)))
        del active[:done]
        for _, other in active:
            if box.intersect(boxes[other]):
                return boxes[other], box
        bisect.insort(active, (box.stop[axis], index))
    return None
