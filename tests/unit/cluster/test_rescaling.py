import pytest

from tensorforge.elastic import ClusterTopology, RescaleType, RescalingEvent, WorkerId
from tensorforge.errors import InvalidInputError

A, B, C = (WorkerId(name, "host", 7) for name in "abc")


def test_an_event_derives_who_came_and_who_went():
    old = ClusterTopology(workers=(A, B), epoch=1)
    grown = RescalingEvent.between(old, old.succeed((A, B, C)), "c joined")
    assert (grown.type, grown.added_workers, grown.removed_workers) == (
        RescaleType.SCALE_UP,
        (C,),
        (),
    )
    shrunk = RescalingEvent.between(old, old.succeed((A,)), "b failed")
    assert (shrunk.type, shrunk.removed_workers) == (RescaleType.SCALE_DOWN, (B,))
    replaced = RescalingEvent.between(old, old.succeed((A, C)), "c replaces b")
    assert replaced.type is RescaleType.REPLACE


def test_an_event_leads_forward_and_its_lists_are_true():
    old = ClusterTopology(workers=(A,), epoch=3)
    with pytest.raises(InvalidInputError, match="does not follow"):
        RescalingEvent.between(old, ClusterTopology(epoch=3), "x")
    with pytest.raises(InvalidInputError, match="added_workers"):
        RescalingEvent(type=RescaleType.SCALE_UP, old_topology=old, new_topology=old.add_worker(B))
    with pytest.raises(InvalidInputError, match="removed_workers"):
        RescalingEvent(
            type=RescaleType.SCALE_DOWN, old_topology=old, new_topology=old.remove_worker(A)
        )
