from hypothesis import given
from hypothesis import strategies as st

from tensorforge.train.data.placement import Placement, single_holders
from tensorforge.train.gradients.shard_tree import ShardTree
from tensorforge.train.gradients.step_work import share_work

STORED = st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=5)


@given(STORED)
def test_every_shard_that_somebody_holds_has_one_holder(stored):
    owned = single_holders(12, stored)
    everything = [shard for own in owned for shard in own]
    assert sorted(everything) == sorted(set().union(*stored))
    assert all(set(own) <= stored[rank] for rank, own in enumerate(owned))


def test_of_several_holders_the_one_with_less_is_chosen():
    assert single_holders(4, [{0, 1, 2, 3}, {2, 3}]) == [[0, 1], [2, 3]]


@given(STORED, st.data())
def test_a_shard_is_computed_where_it_is_until_it_has_arrived(stored, data):
    members = len(stored)
    owners = data.draw(st.lists(st.integers(0, members - 1), min_size=12, max_size=12))
    placement = Placement(owners, stored)
    for shard, place in enumerate(placement.computed_by):
        somebody = any(shard in own for own in stored)
        assert shard in stored[place] if somebody else place == owners[shard]
    arrived = [own | {s for s, o in enumerate(owners) if o == r} for r, own in enumerate(stored)]
    votes = [placement.arrivals(rank, arrived[rank]) for rank in range(members)]
    placement.follow_arrivals([sum(column) for column in zip(*votes, strict=True)])
    assert placement.is_settled
    assert not any(any(placement.arrivals(rank, arrived[rank])) for rank in range(members))


def test_what_is_owned_or_still_computed_must_be_kept():
    placement = Placement([0, 1], [{0, 1}, set()])
    assert placement.needed_by(0) == {0, 1}
    assert placement.needed_by(1) == {1}
    placement.follow_arrivals([0, 1])
    assert placement.needed_by(0) == {0}


def test_work_follows_the_places_and_keeps_what_is_computed():
    shares = share_work(ShardTree(4), [[(0, 2)], []], [1, 1, 0, 1])
    assert [share.kept for share in shares] == [((0, 2),), ()]
    assert [share.compute for share in shares] == [(2,), (3,)]
