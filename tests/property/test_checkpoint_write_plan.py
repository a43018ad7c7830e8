from hypothesis import given
from hypothesis import strategies as st
from tests.property.checkpoint_boxes import clusters, mark

from tensorforge.checkpoint.format.boxes import Box, check_partition
from tensorforge.checkpoint.format.formats import CheckpointFormat
from tensorforge.checkpoint.save.write_plan import plan_files


@given(clusters(), st.sampled_from(CheckpointFormat))
def test_a_plan_has_every_element_in_one_file_and_exchanges_every_missing_box(rank_boxes, layout):
    plans = plan_files(layout, "p", rank_boxes, compressed=False)
    tensors = {tensor_box.name: tensor_box for rank in rank_boxes for tensor_box in rank}
    for name, tensor_box in tensors.items():
        in_files = [
            (rank, each)
            for rank, plan in enumerate(plans)
            for file in plan.files
            for each in file.boxes
            if each.name == name
        ]
        check_partition(tensor_box.shape, [each.box for _, each in in_files], name)
        for rank, each in in_files:
            here = [h.box for h in rank_boxes[rank] if h.name == name]
            sent = [
                p.box
                for plan in plans
                if plan.exchange
                for p in plan.exchange.boxes
                if p.name == name
            ]
            covered = mark(tensor_box.shape, [*here, *sent])[
                each.box.slices_in(Box.full(tensor_box.shape))
            ]
            assert (covered > 0).all()
    keys = [file.key for plan in plans for file in plan.files]
    assert len(keys) == len(set(keys))
