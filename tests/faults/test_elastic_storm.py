"""Twenty workers that join a running cluster at once."""

import contextlib
import itertools
import signal
from datetime import datetime, timedelta

from tensorforge.elastic import ElasticTrainingConfig
from tensorforge.testing.process_cluster import ProcessCluster

VETERANS = ["old0", "old1", "old2"]
STORM = [f"new{index:02}" for index in range(20)]
WINDOW = timedelta(seconds=3)


@contextlib.contextmanager
def running_cluster(folder, **options):
    config = ElasticTrainingConfig(
        stability_window_ms=round(WINDOW.total_seconds() * 1000),
        worker_heartbeat_timeout_ms=20_000,
        rescale_timeout_ms=60_000,
        failure_tolerance_percentage=100,
        **options,
    )
    with ProcessCluster(folder, config) as local:
        local.start_coordinator()
        for name in VETERANS:
            local.start_worker(name)
        local.wait_until_active(set(VETERANS))
        yield local


def storm(local):
    """Start all of them, and wait until each is a member or a standby and the cluster trains."""
    for name in STORM:
        local.start_worker(name)

    def is_calm():
        view = local.status()
        limit = view.max_workers or len(VETERANS) + len(STORM)
        return len(view.workers) == limit and len(view.waiting) == 23 - limit

    local.wait_until(is_calm, "everybody is in")
    return local.wait_until_active(set(local.members()))


def names(view):
    """The members in order of rank."""
    return [worker.id for worker in view.workers]


def everybody(view):
    return [*view.workers, *view.waiting]


def waves(view):
    """In how many groups they came: one more than there were silences of a whole window."""
    joins = sorted(worker.joined_at for worker in everybody(view) if worker.id in STORM)
    return 1 + sum(later - earlier >= WINDOW for earlier, later in itertools.pairwise(joins))


def last_formation(local, name):
    return [event for event in local.workers[name].events() if event["what"] == "formed"][-1]


def check_agreement(local, view):
    """All members name the same members and generation, and each has the rank that its place says."""
    assert [worker.rank for worker in view.workers] == list(range(len(view.workers)))
    for rank, name in enumerate(names(view)):
        found = last_formation(local, name)
        assert (found["generation"], found["members"]) == (view.generation, names(view))
        assert found["rank"] == rank


def test_twenty_who_join_a_running_cluster_together_are_one_rescale(tmp_path):
    with running_cluster(tmp_path) as local:
        first = local.status()
        view = storm(local)
        rescales = [record for record in view.rescales if record.generation > first.generation]
        assert len(rescales) <= waves(view)
        assert sorted(name for record in rescales for name in record.added) == STORM
        assert not any(record.removed or record.urgent for record in rescales)
        joined = {worker.id: worker.joined_at for worker in everybody(view)}
        for record in rescales:
            newest = max(joined[name] for name in record.added)
            waited = datetime.fromisoformat(record.decided_at) - newest
            assert waited >= WINDOW - timedelta(milliseconds=1), "it waited for quiet"
        assert names(view)[:3] == names(first), "those who were here keep their ranks"
        check_agreement(local, view)
        assert last_formation(local, "old0")["step"] > first.state.step, (
            "training went on meanwhile"
        )
        assert not any(event["what"] == "fenced" for event in local.workers["old0"].events())


def test_whoever_joins_beyond_the_maximum_stands_by_and_replaces_the_next_who_fails(tmp_path):
    with running_cluster(tmp_path, max_workers=8) as local:
        first = local.status()
        view = storm(local)
        assert view.generation - first.generation <= waves(view)
        assert names(view)[:3] == names(first), "those who were here keep their ranks"
        check_agreement(local, view)
        assert all(worker.rank == -1 for worker in view.waiting)
        standbys = {worker.id for worker in view.waiting}
        for name in standbys:
            assert not any(e["what"] == "formed" for e in local.workers[name].events())
        local.workers["old1"].signal(signal.SIGKILL)
        replacement = view.waiting[0].id
        members = set(names(view)) - {"old1"} | {replacement}
        after = local.wait_until_active(members)
        assert after.generation == view.generation + 1
        assert after.rescales[-1].type == "replace"
        assert names(after) == [replacement if n == "old1" else n for n in names(view)]
        check_agreement(local, after)
