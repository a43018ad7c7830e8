from hypothesis import given
from hypothesis import strategies as st
from tests.property.checkpoint_boxes import clusters

from tensorforge.checkpoint.format.boxes import TensorBox, check_partition
from tensorforge.checkpoint.save.assignment import agreed_ties, assign, owners


@given(st.data())
def test_a_tie_counts_only_if_every_rank_with_elements_has_it(data):
    ranks = data.draw(st.integers(1, 4))
    rank_boxes, ties, verdicts = [], [], []
    for _ in range(ranks):
        rows = data.draw(st.integers(0, 2))
        tied = data.draw(st.booleans()) if rows else False
        rank_boxes.append([TensorBox(name, "F32", (8,), (0,), (rows,)) for name in ("a", "b")])
        ties.append({"b": "a"} if tied else {})
        verdicts += [tied] if rows else []
    expected = {"b": "a"} if verdicts and all(verdicts) else {}
    assert agreed_ties(rank_boxes, ties) == expected


@given(clusters(), st.booleans())
def test_every_element_is_written_once_by_a_rank_that_has_it(rank_boxes, may_split):
    written = assign(rank_boxes, split=may_split)
    tensors = {tensor_box.name: tensor_box.shape for rank in rank_boxes for tensor_box in rank}
    for name, shape in tensors.items():
        chosen = [each.box for rank in written for each in rank if each.name == name]
        check_partition(shape, chosen, name)
    for mine, chosen in zip(rank_boxes, written, strict=True):
        for each in chosen:
            assert any(h.name == each.name and h.box.contains(each.box) for h in mine)


@given(clusters())
def test_complete_tensors_go_to_ranks_that_have_them_if_any_does(rank_boxes):
    for name, rank in owners(rank_boxes, len(rank_boxes)).items():
        holders = {
            r
            for r, mine in enumerate(rank_boxes)
            for h in mine
            if h.name == name and h.extent == h.shape
        }
        assert rank in holders or not holders
