"""The order of additions along the tree, and the division of a step among members."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.errors import InvalidInputError
from tensorforge.train.gradients.shard_tree import ShardTree, TreeSum, children, is_leaf
from tensorforge.train.gradients.step_work import share_work

SHARDS = st.integers(min_value=1, max_value=40)


@st.composite
def owners(draw):
    shards = draw(SHARDS)
    members = draw(st.integers(min_value=1, max_value=6))
    places = st.integers(min_value=0, max_value=members - 1)
    owner = draw(st.lists(places, min_size=shards, max_size=shards))
    return shards, [[s for s in range(shards) if owner[s] == m] for m in range(members)]


def leaves(shards):
    return [(shard, shard + 1) for shard in shards]


def bracketed(left, right):
    return f"({left}+{right})"


def reference(low, high):
    if high - low == 1:
        return str(low)
    middle = (low + high) // 2
    return bracketed(reference(low, middle), reference(middle, high))


@given(owners())
def test_any_division_among_members_adds_up_in_the_same_order(case):
    shards, owned = case
    tree, parts = ShardTree(shards), {}
    for mine in owned:
        partial = TreeSum(tree, bracketed)
        for shard in mine:
            partial.put((shard, shard + 1), str(shard))
        assert tuple(sorted(partial.parts)) == tree.merged(leaves(mine))
        parts |= partial.parts
    assert tree.fold(parts, bracketed) == reference(0, shards)


@given(owners())
def test_merged_nodes_are_exact_disjoint_and_maximal(case):
    shards, owned = case
    tree = ShardTree(shards)
    for mine in owned:
        merged = tree.merged(leaves(mine))
        assert [s for low, high in merged for s in range(low, high)] == mine
        for node in merged:
            above = tree.parent(node)
            assert above is None or not set(range(*above)) <= set(mine)


@given(st.data())
def test_shards_may_be_put_in_any_order(data):
    shards = data.draw(st.integers(min_value=1, max_value=16))
    order = data.draw(st.permutations(range(shards)))
    total = TreeSum(ShardTree(shards), bracketed)
    for shard in order:
        total.put((shard, shard + 1), str(shard))
    assert total.parts == {(0, shards): reference(0, shards)}


@given(SHARDS)
def test_in_order_only_one_part_per_level_is_alive(shards):
    total = TreeSum(ShardTree(shards), bracketed)
    for shard in range(shards):
        total.put((shard, shard + 1), str(shard))
        assert len(total.parts) <= shards.bit_length() + 1


@given(st.integers(min_value=1, max_value=6), st.integers(min_value=1, max_value=6))
def test_an_aligned_block_is_a_single_subtree(levels, members_log):
    shards, members = 2**levels, 2 ** min(levels, members_log)
    tree = ShardTree(shards)
    shares = share_work(tree, [()] * members)
    assert all(len(share.nodes(tree)) == 1 for share in shares)


@st.composite
def finished_nodes(draw):
    shards = draw(st.integers(min_value=1, max_value=24))
    tree = ShardTree(shards)
    every = [(low, high) for low, high in itertools.combinations(range(shards + 1), 2)]
    nodes = [node for node in every if node in tree]
    members = draw(st.integers(min_value=1, max_value=5))
    finished = [draw(st.sets(st.sampled_from(nodes), max_size=4)) for _ in range(members)]
    return tree, finished


@given(finished_nodes())
def test_work_is_complete_disjoint_and_even_whatever_is_finished(case):
    tree, finished = case
    shares = share_work(tree, finished)
    everything = []
    for share, mine in zip(shares, finished, strict=True):
        assert set(share.kept) <= set(mine)
        everything += [s for low, high in share.kept for s in range(low, high)]
        everything += share.compute
    assert sorted(everything) == list(range(tree.shards))
    loads = [len(share.compute) for share in shares]
    assert max(loads) - min(loads) <= 1
    parts = {node: reference(*node) for share in shares for node in share.nodes(tree)}
    assert tree.fold(parts, bracketed) == reference(0, tree.shards)


@given(finished_nodes())
def test_a_disjoint_finished_node_is_never_computed_again(case):
    tree, finished = case
    seen, disjoint = set(), True
    for node in (node for nodes in finished for node in nodes):
        disjoint &= not (set(range(*node)) & seen)
        seen |= set(range(*node))
    if disjoint:
        again = {s for share in share_work(tree, finished) for s in share.compute}
        assert not again & seen


def test_children_halve_a_node():
    assert children((0, 5)) == ((0, 2), (2, 5))
    assert is_leaf((3, 4))
    assert not is_leaf((3, 5))


def test_what_is_no_node_is_refused():
    tree = ShardTree(4)
    with pytest.raises(InvalidInputError, match=r"\(1, 3\) is no node"):
        tree.parent((1, 3))
    with pytest.raises(InvalidInputError, match=r"\(4, 5\) is no node"):
        tree.merged([(4, 5)])
    with pytest.raises(InvalidInputError, match="whole tree"):
        tree.fold({(0, 2): "x"}, bracketed)
    with pytest.raises(InvalidInputError, match="at least one shard"):
        ShardTree(0)
    with pytest.raises(InvalidInputError, match="at least one member"):
        share_work(tree, [])


def test_a_shard_cannot_be_put_twice():
    total = TreeSum(ShardTree(4), bracketed)
    total.put((0, 2), "x")
    with pytest.raises(InvalidInputError, match="overlaps"):
        total.put((1, 2), "y")
