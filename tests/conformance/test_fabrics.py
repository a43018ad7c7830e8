"""Every fabric keeps the same promises, and the sum over all members is right on one that delays everything."""

import pytest
import torch
from tests.conformance.delaying_fabric import DelayingNetwork
from tests.conformance.fabric_conformance import CHECKS, ENDING_CHECKS, on_all
from torch import nn

from tensorforge.train.gradients.flat_layout import FlatLayout
from tensorforge.train.gradients.reduction import TreeReduction
from tensorforge.train.gradients.shard_tree import ShardTree
from tensorforge.train.gradients.step_work import share_work
from tensorforge.train.group.fabric import GroupAbortedError
from tensorforge.train.group.generation_group import GenerationGroup
from tensorforge.train.group.gloo_fabric import GenerationStore, GlooFabric

CPU = torch.device("cpu")
SHARDS = 5


@pytest.fixture(scope="module", autouse=True)
def first_store():
    """torch keeps one pipe for good when it serves a store for the first time; it is no test's leak."""
    GenerationStore("127.0.0.1").close()


def gloo_members():
    store = GenerationStore("127.0.0.1")
    members = [
        GlooFabric(store=store.address, generation=1, rank=rank, world_size=3) for rank in range(3)
    ]
    on_all(members, lambda fabric: fabric.form())
    yield members
    for fabric in members:
        fabric.close()
    store.close()


def delaying_members():
    yield DelayingNetwork(3).members()


@pytest.fixture(params=[gloo_members, delaying_members], ids=["gloo", "delaying"])
def members(request):
    yield from request.param()


@pytest.mark.parametrize("check", [*CHECKS, *ENDING_CHECKS], ids=lambda check: check.__name__)
def test_a_fabric_keeps_its_promise(members, check):
    check(members, CPU)


class Member:
    """One member of a reduction: its shards' sums, of a model with parameters of several sizes."""

    def __init__(self, fabric, bucket_bytes):
        self.group = GenerationGroup(fabric)
        model = nn.Sequential(nn.Linear(30, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        self.layout, tree = FlatLayout(model), ShardTree(SHARDS)
        self.nodes = [share.nodes(tree) for share in share_work(tree, [()] * fabric.world_size)]
        self.sums = {node: self.values(node) for node in self.nodes[fabric.rank]}
        self.reduction = TreeReduction(self.layout, tree, bucket_bytes)

    def values(self, node):
        """Whole numbers, whose sums are exact in any order."""
        return [
            [
                torch.full(entry.shape, sum(range(*node)) + 1, dtype=group.dtype)
                for entry in group.entries
            ]
            for group in self.layout.groups
        ]

    def reduce(self):
        return [
            [float(value.float().mean()) for value in group]
            for group in self.reduction.reduce(self.group, self.nodes, self.sums)
        ]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bucket_bytes", [256, 1 << 20])
def test_a_reduction_is_right_in_every_order_of_completion(seed, bucket_bytes):
    fabrics = DelayingNetwork(3, seed=seed).members()
    members = [Member(fabric, bucket_bytes) for fabric in fabrics]
    found = on_all(fabrics, lambda fabric: [members[fabric.rank].reduce() for _ in range(2)])
    nodes = [node for each in members[0].nodes for node in each]
    total = float(sum(sum(range(*node)) + 1 for node in nodes))
    first = float(sum(range(*min(nodes))) + 1)
    groups = members[0].layout.groups
    expected = [[total if group.summed else first] * len(group.entries) for group in groups]
    assert found == [[expected, expected]] * 3


@pytest.mark.parametrize("abort_at", [1, 3, 6])
def test_a_reduction_that_is_aborted_leaves_the_sums_as_they_were(abort_at):
    fabrics = DelayingNetwork(3, abort_at=abort_at).members()
    members = [Member(fabric, 256) for fabric in fabrics]

    def reduce(fabric):
        with pytest.raises(GroupAbortedError):
            members[fabric.rank].reduce()

    on_all(fabrics, reduce)
    for member in members:
        kept = [tensor for node in member.sums for group in member.sums[node] for tensor in group]
        expected = [
            tensor for node in member.sums for group in member.values(node) for tensor in group
        ]
        assert all(map(torch.equal, kept, expected))
