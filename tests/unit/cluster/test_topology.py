import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.elastic import ClusterTopology, WorkerId
from tensorforge.errors import AlreadyExistsError, InvalidInputError, NotFoundError

A, B, C = (WorkerId(name, "127.0.0.1", 1) for name in "abc")


def test_a_new_member_makes_a_new_topology_and_leaves_the_old_one_alone():
    old = ClusterTopology(workers=(A,), epoch=4)
    new = old.add_worker(B)
    assert (old.workers, old.epoch, old.world_size) == ((A,), 4, 1)
    assert (new.workers, new.epoch, new.world_size) == ((A, B), 5, 2)


def test_the_others_keep_their_order_when_one_leaves():
    topology = ClusterTopology(workers=(A, B, C)).remove_worker(B)
    assert topology.workers == (A, C)
    assert (topology.rank_of(C), topology.epoch) == (1, 1)


def test_a_topology_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ClusterTopology().epoch = 3
    assert isinstance(ClusterTopology(workers=[A]).workers, tuple)


def test_adding_a_member_or_removing_a_stranger_is_an_error():
    topology = ClusterTopology(workers=(A,), epoch=1)
    with pytest.raises(AlreadyExistsError, match="a is already a member of generation 1"):
        topology.add_worker(WorkerId("a", "elsewhere", 9))
    with pytest.raises(NotFoundError, match=r"b@127.0.0.1:1 is not a member of generation 1"):
        topology.remove_worker(B)


def test_members_have_different_ids():
    with pytest.raises(InvalidInputError, match="same id"):
        ClusterTopology(workers=(A, WorkerId("a", "elsewhere", 9)))


@pytest.mark.parametrize("epoch", [-1, 1.0, True, None])
def test_a_generation_is_a_whole_number(epoch):
    with pytest.raises(InvalidInputError, match="epoch"):
        ClusterTopology(epoch=epoch)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([A, B, C]))))
def test_the_generation_grows_by_one_with_each_change(changes):
    topology = ClusterTopology()
    for joins, worker in changes:
        before = topology.epoch
        if joins == (worker in topology):
            continue
        topology = topology.add_worker(worker) if joins else topology.remove_worker(worker)
        assert topology.epoch == before + 1
        assert (worker in topology) is joins
