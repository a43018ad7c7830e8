"""Strategies: boxes, partitions of tensors, and ranks that have them."""

import numpy as np
from hypothesis import strategies as st

from tensorforge.checkpoint.format.boxes import Box, TensorBox

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@st.composite
def boxes(draw, shape=None):
    shape = draw(shapes) if shape is None else shape
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


@st.composite
def partitions(draw, shape, depth=3):
    """Cut a box again and again at random places."""
    found = [Box.full(shape)]
    for _ in range(draw(st.integers(0, depth)) if shape else 0):
        box = found.pop(draw(st.integers(0, len(found) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.shape[axis]))
        for start, count in ((0, cut), (cut, box.shape[axis] - cut)):
            offset, extent = list(box.offset), list(box.shape)
            offset[axis] += start
            extent[axis] = count
            found.append(Box(tuple(offset), tuple(extent)))
    return found


def mark(shape, parts):
    count = np.zeros(shape, int)
    for box in parts:
        count[box.slices_in(Box.full(shape))] += 1
    return count


@st.composite
def clusters(draw):
    """For each rank its boxes of some tensors, which are cut at random; a box is on one rank or more."""
    ranks = draw(st.integers(1, 5))
    rank_boxes = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(1, 4))):
        shape = draw(shapes)
        for box in draw(partitions(shape)):
            if not box.size:
                continue
            holders = draw(st.sets(st.integers(0, ranks - 1), min_size=1))
            for rank in holders:
                rank_boxes[rank].append(
                    TensorBox(f"model/{number}", "F32", shape, box.offset, box.shape)
                )
    return rank_boxes
