from datetime import UTC, datetime, timedelta

import pytest

from tensorforge.elastic import (
    WORKER_LIFECYCLE,
    ClusterTopology,
    GlobalTrainingState,
    RescaleType,
    RescalingEvent,
    WorkerId,
    WorkerMetadata,
    WorkerStatus,
)
from tensorforge.errors import InvalidInputError

NOW = datetime(2026, 1, 1, tzinfo=UTC)
A, B, C = (WorkerId(name, "host", 7) for name in "abc")


def test_a_worker_is_written_with_its_address():
    assert str(A) == "a@host:7"
    assert len({A, WorkerId("a", "host", 7)}) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("", "h", 1),
        ("a", "", 1),
        ("a", "h", -1),
        ("a", "h", 65536),
        ("a", "h", True),
        ("a", "h", "1"),
    ],
)
def test_a_worker_needs_a_name_a_host_and_a_port(arguments):
    with pytest.raises(InvalidInputError):
        WorkerId(*arguments)


def metadata(**changes):
    values = {
        "worker_id": A,
        "status": WorkerStatus.ACTIVE,
        "join_time": NOW,
        "last_heartbeat": NOW,
    }
    return WorkerMetadata(**(values | changes))


def test_a_worker_is_healthy_until_its_silence_reaches_the_timeout():
    timeout = timedelta(seconds=10)
    assert metadata().is_healthy(timeout, NOW + timedelta(seconds=9.999))
    assert not metadata().is_healthy(timeout, NOW + timedelta(seconds=10))


def test_attributes_are_copied_and_cannot_be_changed():
    given = {"zone": "a"}
    worker = metadata(custom_attributes=given)
    given["zone"] = "b"
    assert worker.custom_attributes["zone"] == "a"
    with pytest.raises(TypeError):
        worker.custom_attributes["zone"] = "c"


@pytest.mark.parametrize("changes", [{"rank": -2}, {"local_world_size": 0}])
def test_impossible_metadata_is_refused(changes):
    with pytest.raises(InvalidInputError):
        metadata(**changes)


def test_a_failed_worker_comes_back_only_as_a_newcomer():
    assert WORKER_LIFECYCLE.allowed(WorkerStatus.FAILED) == (WorkerStatus.JOINING,)
    assert not WORKER_LIFECYCLE.can_transition(WorkerStatus.LEAVING, WorkerStatus.ACTIVE)
    assert set(WORKER_LIFECYCLE.states) == set(WorkerStatus)


@pytest.mark.parametrize(
    "changes",
    [
        {"current_epoch": -1},
        {"current_step": 1.5},
        {"global_batch_size": True},
        {"learning_rate": float("nan")},
        {"learning_rate": -0.1},
    ],
)
def test_an_impossible_training_state_is_refused(changes):
    values = {
        "current_epoch": 0,
        "current_step": 0,
        "learning_rate": 0.1,
        "global_batch_size": 8,
        "active_worker_count": 1,
    }
    with pytest.raises(InvalidInputError, match=next(iter(changes))):
        GlobalTrainingState(**(values | changes))


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
