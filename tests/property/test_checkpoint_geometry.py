import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.checkpoint.format.boxes import (
    Box,
    TensorBox,
    check_partition,
    divide,
    find_overlap,
    split,
)
from tensorforge.checkpoint.format.formats import CheckpointFormat
from tensorforge.checkpoint.format.manifest import ChunkMetadata, StoredBytes, TensorMetadata
from tensorforge.checkpoint.load.resharding import WantedBox, plan_reads
from tensorforge.checkpoint.save.assignment import assign, owners
from tensorforge.checkpoint.save.write_plan import plan_files
from tensorforge.errors import InvalidInputError

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
solid_shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)


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


@given(st.data())
def test_an_intersection_is_what_both_boxes_hold(data):
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
    pieces = [numbers[part.slices_in(Box.full(shape))].ravel() for part in parts]
    assert all(len(piece) <= limit for piece in pieces)
    assert np.array_equal(np.concatenate(pieces), numbers.ravel())


@given(st.data())
def test_a_box_that_is_one_run_says_where_it_begins(data):
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
def test_sharing_cuts_into_at_most_so_many_parts(shape, parts):
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


@st.composite
def clusters(draw):
    """What each of some ranks holds of some tensors: cut at random, each piece on one rank or several."""
    ranks = draw(st.integers(1, 5))
    held = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(1, 4))):
        shape = draw(shapes)
        for box in draw(partitions(shape)):
            if not box.size:
                continue
            holders = draw(st.sets(st.integers(0, ranks - 1), min_size=1))
            for rank in holders:
                held[rank].append(TensorBox(f"model/{number}", "F32", shape, box.offset, box.shape))
    return held


@given(clusters(), st.booleans())
def test_every_element_is_written_once_by_a_rank_that_holds_it(held, may_split):
    written = assign(held, split=may_split)
    whole = {holding.name: holding.shape for rank in held for holding in rank}
    for name, shape in whole.items():
        pieces = [piece.box for rank in written for piece in rank if piece.name == name]
        check_partition(shape, pieces, name)
    for mine, pieces in zip(held, written, strict=True):
        for piece in pieces:
            assert any(h.name == piece.name and h.box.contains(piece.box) for h in mine)


@given(clusters(), st.sampled_from(CheckpointFormat))
def test_a_plan_has_every_element_in_one_file_and_every_missing_part_on_its_way(held, layout):
    plans = plan_files(layout, "p", held, compressed=False)
    whole = {holding.name: holding for rank in held for holding in rank}
    for name, holding in whole.items():
        in_files = [
            (rank, piece)
            for rank, plan in enumerate(plans)
            for file in plan.files
            for piece in file.boxes
            if piece.name == name
        ]
        check_partition(holding.shape, [piece.box for _, piece in in_files], name)
        for rank, piece in in_files:
            here = [h.box for h in held[rank] if h.name == name]
            sent = [
                p.box
                for plan in plans
                if plan.exchange
                for p in plan.exchange.boxes
                if p.name == name
            ]
            covered = mark(holding.shape, [*here, *sent])[
                piece.box.slices_in(Box.full(holding.shape))
            ]
            assert (covered > 0).all()
    keys = [file.key for plan in plans for file in plan.files]
    assert len(keys) == len(set(keys))


@given(clusters())
def test_whole_tensors_go_to_ranks_that_hold_them_if_any_does(held):
    for name, rank in owners(held, len(held)).items():
        holders = {
            r for r, mine in enumerate(held) for h in mine if h.name == name and h.extent == h.shape
        }
        assert rank in holders or not holders


@given(st.data())
def test_reads_bring_every_element_of_every_target_exactly_once(data):
    shape = data.draw(shapes)
    chunks, position = [], 0
    for box in data.draw(partitions(shape, depth=6)):
        if box.size:
            stored = StoredBytes(0, position, box.size * 4, "0" * 32)
            chunks.append(ChunkMetadata(box.offset, box.shape, stored))
            position += box.size * 4 + data.draw(st.sampled_from([0, 0, 100, 1 << 20]))
    tensor = TensorMetadata("F32", shape, tuple(chunks))
    targets = [
        WantedBox(index, "t", box) for index, box in enumerate(data.draw(st.lists(boxes(shape))))
    ]
    reads = plan_reads({"t": tensor}, targets)
    for target in targets:
        got = [
            overlap.box
            for read in reads
            for chunk in read.chunks
            for overlap in chunk.overlaps
            if overlap.wanted is target
        ]
        assert (mark(shape, got) == mark(shape, [target.box])).all()
    spans = sorted((read.start, read.start + read.length) for read in reads)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
