"""Geometry of sharded tensors: boxes of indices, how they overlap, and whether they cover a tensor."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from tensorforge.checkpoint.format.formats import ITEM_SIZES
from tensorforge.errors import InvalidInputError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A rectangular set of indices: `shape` many from `offset` on, per dimension.

    The box of a scalar is `Box((), ())`.
    """

    offset: Shape
    shape: Shape

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise InvalidInputError(f"offset {self.offset} and shape {self.shape} differ in length")
        if self.shape and (min(self.offset) < 0 or min(self.shape) < 0):
            raise InvalidInputError(f"a box has no negative numbers: {self.offset}, {self.shape}")

    @classmethod
    def full(cls, shape: Shape) -> Box:
        """The box that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> Shape:
        """One past the last index along each dimension."""
        return tuple(map(operator.add, self.offset, self.shape))

    @property
    def size(self) -> int:
        """The number of elements in the box."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The box of the indices that are in both boxes, or `None` if there are none."""
        starts = tuple(map(max, self.offset, other.offset))
        shape = tuple(map(operator.sub, map(min, self.stop, other.stop), starts))
        return Box(starts, shape) if min(shape, default=1) > 0 else None

    def contains(self, other: Box) -> bool:
        """Whether every index of `other` is in this box."""
        return all(
            a <= c and d <= b
            for a, b, c, d in zip(self.offset, self.stop, other.offset, other.stop, strict=True)
        )

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """The slices that select this box in an array with the elements of `outer`."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.offset, outer.offset, self.shape, strict=True)
        )

    def position_in(self, outer: Box) -> int | None:
        """The position of this box's first element among the elements of `outer` in row-major order.

        `None` if the elements of this box are not consecutive in that order.
        """
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


class TensorBox(msgspec.Struct, frozen=True, array_like=True):
    """A box of a named tensor. `shape` is the shape of the tensor, `offset` and `extent` are the box."""

    name: str
    dtype: str
    shape: Shape
    offset: Shape
    extent: Shape

    @property
    def box(self) -> Box:
        """The indices."""
        return Box(self.offset, self.extent)

    @property
    def nbytes(self) -> int:
        """The size of the box's elements in bytes."""
        return self.box.size * ITEM_SIZES[self.dtype]

    @property
    def tensor_bytes(self) -> int:
        """The size of the complete tensor in bytes."""
        return Box.full(self.shape).size * ITEM_SIZES[self.dtype]

    @property
    def is_complete(self) -> bool:
        """Whether the box covers the tensor."""
        return self.extent == self.shape

    def with_box(self, box: Box) -> TensorBox:
        """Another box of the same tensor."""
        return TensorBox(self.name, self.dtype, self.shape, box.offset, box.shape)


def split(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `limit` elements, each consecutive in the row-major order of `box`.

    The boxes come in that order and are about equally large, so that a reader that needs half of `box`
    finds a cut near its middle.
    """
    if box.size <= limit:
        if box.size:
            yield box
        return
    extent = next(size for size in box.shape if size > 1)
    rows = max(1, limit * extent // box.size)
    for smaller in divide(box, -(-extent // rows)):
        yield from split(smaller, limit)


def _narrow(box: Box, axis: int, start: int, count: int) -> Box:
    """The box restricted to `count` indices from its index `start` on, along one dimension."""
    offset, shape = list(box.offset), list(box.shape)
    offset[axis] += start
    shape[axis] = count
    return Box(tuple(offset), tuple(shape))


def divide(box: Box, count: int) -> list[Box]:
    """Cut a box into `count` boxes along its first dimension that is longer than 1.

    There are fewer boxes if that dimension is shorter than `count`.
    """
    axis = next((index for index, size in enumerate(box.shape) if size > 1), None)
    if axis is None:
        return [box]
    extent = box.shape[axis]
    cuts = [extent * index // count for index in range(count + 1)]
    return [_narrow(box, axis, a, b - a) for a, b in itertools.pairwise(cuts) if b > a]


def check_partition(shape: Shape, boxes: Iterable[Box], what: str) -> None:
    """Raise `InvalidInputError` unless the boxes are disjoint and together cover a tensor of `shape`."""
    full = Box.full(shape)
    filled = [box for box in boxes if box.size]
    if _is_cut_along_rows(full, filled):
        return
    for box in filled:
        if len(box.shape) != len(shape) or not full.contains(box):
            raise InvalidInputError(f"{what}: {box} is outside of shape {shape}")
    overlap = find_overlap(filled)
    if overlap:
        raise InvalidInputError(f"{what}: {overlap[0]} and {overlap[1]} overlap")
    missing = full.size - sum(box.size for box in filled)
    if missing:
        raise InvalidInputError(f"{what}: {missing} of {full.size} elements are missing")


def _is_cut_along_rows(full: Box, boxes: list[Box]) -> bool:
    """Whether the boxes are the rows of a tensor in order, cut along the first dimension only.

    Most tensors are cut in this way, and this check takes far less time than `find_overlap`.
    """
    if not full.shape or not boxes:
        return False
    inner, row, reached = full.offset[1:], full.shape[1:], 0
    for box in boxes:
        if not box.shape or box.shape[1:] != row or box.offset != (reached, *inner):
            return False
        reached += box.shape[0]
    return reached == full.shape[0]


def find_overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or `None`.

    The function sweeps along the dimension with the most cuts, so that each of the many boxes of a large
    cluster is compared with its neighbours only.
    """
    if len(boxes) < 2 or not boxes[0].shape:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    axis = max(range(len(boxes[0].shape)), key=lambda d: len({box.offset[d] for box in boxes}))
    active: list[tuple[int, int]] = []  # (end of the box along the axis, index), smallest end first
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
