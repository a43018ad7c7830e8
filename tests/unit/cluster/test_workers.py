from datetime import UTC, datetime, timedelta

import pytest

from tensorforge.elastic import WORKER_LIFECYCLE, WorkerId, WorkerMetadata, WorkerStatus
from tensorforge.errors import InvalidInputError

NOW = datetime(2026, 1, 1, tzinfo=UTC)
A = WorkerId("a", "host", 7)


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
