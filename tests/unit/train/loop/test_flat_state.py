from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.errors import EncodingError, InvalidInputError
from tensorforge.train.loop.flat_state import FlatState, empty_like_header, flatten, unflatten

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers(0, 9) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain)
def test_plain_data_comes_back_as_it_was(value):
    assert unflatten(flatten(value)) == value


def test_tensors_of_any_type_come_back_with_their_bits():
    state = {
        "a": torch.randn(3, 4),
        "b": [torch.randn(5).to(torch.bfloat16), torch.tensor(7)],
        "c": torch.empty(0, 3),
        "d": Counter({3: 2}),
        "e": float("nan"),
        "f": torch.float16,
    }
    flat = flatten(state)
    fresh = empty_like_header(flat.header())
    for ours, theirs in zip(fresh.tensors, flat.tensors, strict=True):
        ours.copy_(theirs)
    assert fresh.digest() == flat.digest()
    back = unflatten(fresh)
    assert torch.equal(back["b"][0], state["b"][0])
    assert isinstance(back["d"], Counter)
    assert back["f"] is torch.float16
    assert back["e"] != back["e"]


def test_one_flipped_bit_changes_the_digest():
    tensor = torch.zeros(100)
    before = flatten({"w": tensor}).digest()
    tensor[99] = -0.0
    assert flatten({"w": tensor}).digest() != before


def test_the_order_of_a_dictionary_does_not_matter():
    assert flatten({"a": 1, "b": 2}).digest() == flatten({"b": 2, "a": 1}).digest()


def test_what_has_no_encoding_is_named_with_its_place():
    with pytest.raises(InvalidInputError, match=r"state\['a'\]\[0\]: a function"):
        flatten({"a": [len.__class__ and (lambda: 0)]})


@pytest.mark.parametrize(
    "header", [b"", b"{}", b"[1]", b'[1, [["no", [2]]]]', b'[1, [["int8", [-1]]]]']
)
def test_a_damaged_header_is_refused(header):
    with pytest.raises(EncodingError):
        empty_like_header(header)


@pytest.mark.parametrize("structure", [{"$tensor": 3}, {"$no": 1}, {"$dict": 5}, {"a": 1, "b": 2}])
def test_a_damaged_structure_is_refused(structure):
    with pytest.raises(EncodingError):
        unflatten(FlatState(structure, []))
