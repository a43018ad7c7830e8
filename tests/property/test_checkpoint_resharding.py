import itertools

from hypothesis import given
from hypothesis import strategies as st
from tests.property.checkpoint_boxes import boxes, mark, partitions, shapes

from tensorforge.checkpoint.format.manifest import ChunkMetadata, StoredBytes, TensorMetadata
from tensorforge.checkpoint.load.resharding import WantedBox, plan_reads


@given(st.data())
def test_reads_bring_every_element_of_every_wanted_box_exactly_once(data):
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
