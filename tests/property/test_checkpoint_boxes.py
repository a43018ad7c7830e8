import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.property.checkpoint_boxes import boxes, mark, partitions, shapes

from tensorforge.checkpoint.format.boxes import Box, check_partition, divide, find_overlap, split
from tensorforge.errors import InvalidInputError

solid_shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)


@given(st.data())
def test_an_intersection_has_the_indices_of_both_boxes(data):
    shape = data.draw(shapes)
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    both = (mark(shape, [a]) + mark(shape, [b])) == 2
    overlap = a.intersect(b)
    assert overlap == b.intersect(a)
    if overlap is None:
        assert not both.any()
    else:
        assert (mark(shape, [overlap]) == both).all()


@given(solid_shapes, st.integers(1, 20))
def test_splitting_keeps_order_and_respects_the_limit(shape, limit):
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    parts = list(split(Box.full(shape), limit))
    chosen = [numbers[part.slices_in(Box.full(shape))].ravel() for part in parts]
    assert all(len(each) <= limit for each in chosen)
    assert np.array_equal(np.concatenate(chosen), numbers.ravel())


@given(st.data())
def test_a_box_of_consecutive_elements_has_a_position(data):
    shape = data.draw(solid_shapes)
    outer = Box.full(shape)
    inner = data.draw(boxes(shape).filter(lambda box: box.size))
    numbers = np.arange(outer.size).reshape(shape)[inner.slices_in(outer)].ravel()
    is_run = bool((np.diff(numbers) == 1).all())
    position = inner.position_in(outer)
    if position is None:
        assert not is_run
    else:
        assert is_run
        assert position == numbers[0]


@given(solid_shapes, st.integers(1, 8))
def test_dividing_makes_at_most_so_many_boxes(shape, parts):
    shared = divide(Box.full(shape), parts)
    assert len(shared) <= max(parts, 1)
    check_partition(shape, shared, "it")


@given(st.data())
def test_a_partition_is_recognised_and_anything_else_is_not(data):
    shape = data.draw(shapes)
    parts = data.draw(st.one_of(partitions(shape), st.lists(boxes(shape), max_size=5)))
    is_partition = bool((mark(shape, parts) == 1).all())
    try:
        check_partition(shape, parts, "it")
        assert is_partition
    except InvalidInputError:
        assert not is_partition


@given(st.data())
def test_the_sweep_finds_an_overlap_exactly_if_there_is_one(data):
    shape = data.draw(solid_shapes.filter(bool))
    parts = data.draw(st.lists(boxes(shape).filter(lambda box: box.size), max_size=8))
    expected = any(a.intersect(b) for a, b in itertools.combinations(parts, 2))
    assert (find_overlap(parts) is not None) == expected
