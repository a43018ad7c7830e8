import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.checkpoint.format.state_trees import decode_tree, encode_tree, merge_trees
from tensorforge.errors import EncodingError, InvalidInputError

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=20)
)
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.tuples(st.integers(), st.text()))
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=20,
)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(
                st.text(max_size=5),
                st.sampled_from(["$tuple", "$dict", "$float", "$int", "$bytes", "$tensor"]),
            ),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=10,
)


def no_leaf(value, where):
    return None


def no_reader(tag, value, where):
    raise EncodingError(f"{where}: unknown tag {tag}")


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [*map(repr, a)] == [*map(repr, b)] and all(
            same(x, y) for x, y in zip(a.values(), b.values(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


@given(trees)
def test_what_goes_in_comes_out_with_its_types(tree):
    assert same(decode_tree(encode_tree(tree, no_leaf), no_reader), tree)


@given(anything)
def test_any_json_is_decoded_or_refused(data):
    with contextlib.suppress(EncodingError):
        decode_tree(data, no_reader)


@given(st.dictionaries(st.text(alphabet="abc"), trees), st.data())
def test_states_that_ranks_share_in_any_way_are_united(state, data):
    encoded = encode_tree(state, no_leaf)
    if any(key.startswith("$") for key in encoded):
        return
    ranks = [
        {key: value for key, value in encoded.items() if data.draw(st.booleans())} for _ in range(2)
    ]
    assert merge_trees([*ranks, encoded]) == encoded


def test_what_has_no_encoding_is_refused_by_name():
    with pytest.raises(InvalidInputError, match=r"a/b\[1\] is a object"):
        encode_tree({"a": {"b": [1, object()]}}, no_leaf)


def test_a_circle_is_refused():
    tree = []
    tree.append(tree)
    with pytest.raises(InvalidInputError, match="nested"):
        encode_tree(tree, no_leaf)


def test_ranks_that_disagree_are_told_where():
    with pytest.raises(InvalidInputError, match="groups/lr differs between ranks"):
        merge_trees([{"groups": {"lr": 1}}, {"groups": {"lr": 2}}])
