"""A real coordinator and real workers over gRPC on loopback, in one process."""

import contextlib
import threading
import time

import pytest

from tensorforge.elastic import (
    CoordinatorClient,
    ElasticCoordinator,
    ElasticTrainingConfig,
    ElasticWorker,
    WorkerId,
)
from tensorforge.elastic.coordinator import journal
from tensorforge.errors import ConflictError, TrainingAbortedError, UnavailableError
from tensorforge.storage.database import Database
from tensorforge.testing.minimal_worker import MinimalTrainingLoop

CONFIG = ElasticTrainingConfig(
    stability_window_ms=200,
    worker_heartbeat_timeout_ms=3_000,
    rescale_timeout_ms=20_000,
    failure_tolerance_percentage=100,
)


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("it did not happen in time")
        time.sleep(0.01)


class Team:
    """Workers in threads of this process."""

    def __init__(self, address, config=CONFIG):
        self.address = address
        self.config = config
        self.loops = {}
        self._threads = []

    def add(self, name, **options):
        worker = ElasticWorker(WorkerId(name, "127.0.0.1", 0), self.config, **options)
        worker.connect_to_cluster(self.address)
        loop = MinimalTrainingLoop(worker)
        thread = threading.Thread(target=loop.run)
        thread.start()
        self._threads.append(thread)
        self.loops[name] = loop
        return loop

    def close(self):
        for loop in self.loops.values():
            loop.stop()
            loop.worker.disconnect()
        for thread in self._threads:
            thread.join(20)


@contextlib.contextmanager
def cluster(workers=3, config=CONFIG, **options):
    options.setdefault("desired_workers", workers)
    with ElasticCoordinator(config, **options) as coordinator:
        team = Team(coordinator.address, config)
        try:
            for index in range(workers):
                team.add(f"w{index}")
            if workers:
                until(lambda: coordinator.status().phase == "active")
            yield coordinator, team
        finally:
            team.close()


def members(coordinator):
    return [w.id for w in coordinator.status().workers if w.rank >= 0]


def test_workers_form_train_and_see_each_other():
    with cluster(3) as (coordinator, team):
        until(lambda: coordinator.status().state.step > 3)
        formations = [loop.formations[-1] for loop in team.loops.values()]
        assert formations[0] == formations[1] == formations[2]
        assert formations[0].topology.world_size == 3
        ranks = sorted(loop.worker.metadata().rank for loop in team.loops.values())
        assert ranks == [0, 1, 2]


def test_a_lost_worker_is_replaced_by_one_that_joins():
    with cluster(3, desired_workers=None) as (coordinator, team):
        team.loops["w1"].worker.disconnect()
        until(lambda: members(coordinator) == ["w0", "w2"])
        team.add("w3")
        until(lambda: members(coordinator) == ["w0", "w2", "w3"])
        until(lambda: coordinator.status().phase == "active")
        last = coordinator.status().rescales[-1]
        assert last.added == ("w3",)
        until(lambda: coordinator.status().rescales[-1].first_commit_ms is not None)
        assert team.loops["w3"].formations[-1].newcomers == ("w3",)


def test_a_leaving_worker_is_released_and_the_others_go_on():
    with cluster(3, desired_workers=None) as (coordinator, team):
        team.loops["w0"].worker.leave("maintenance")
        until(lambda: team.loops["w0"].end_reason is not None)
        until(lambda: coordinator.status().phase == "active")
        assert members(coordinator) == ["w1", "w2"]
        assert "maintenance" in coordinator.status().rescales[-1].reason


def test_the_coordinator_can_be_replaced_while_workers_train(tmp_path):
    journal = tmp_path / "journal.db"
    with cluster(3, database=journal) as (first, team):
        port = int(first.address.rpartition(":")[2])
        steps = {name: loop.step for name, loop in team.loops.items()}
        first.close()
        until(lambda: all(loop.step > steps[name] + 5 for name, loop in team.loops.items()))
        with ElasticCoordinator(CONFIG, port=port, database=journal) as second:
            until(lambda: second.counters()[1] == 3)
            status = second.status()
            assert (status.generation, status.phase) == (1, "active")
            step = status.state.step
            until(lambda: second.status().state.step > step + 5)
            assert all(len(loop.formations) == 1 for loop in team.loops.values())
            assert second.status().generation == 1


def test_a_serving_coordinator_keeps_its_journal_short(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "COMPACT_AFTER", 5)
    with Database(tmp_path / "meta.db") as database:
        with ElasticCoordinator(CONFIG, database=database) as coordinator:
            for workers in range(1, 41):
                coordinator.scale(workers)
        assert len(journal.Journal(database).entries()) <= 6
        with ElasticCoordinator(CONFIG, database=database) as successor:
            assert successor.status().desired_workers == 40


def test_the_end_of_the_run_reaches_everybody():
    with cluster(2) as (coordinator, team):
        coordinator.stop_run("enough", by="the test")
        assert coordinator.wait_until_ended(10).outcome == "stopped"
        until(lambda: all(loop.end_reason for loop in team.loops.values()))
        late = ElasticWorker(WorkerId("late", "127.0.0.1", 0), CONFIG)
        with late:
            late.connect_to_cluster(coordinator.address)
            with pytest.raises(TrainingAbortedError, match="enough"):
                late.wait_for_formation(5)


def test_operators_watch_scale_and_remove():
    with cluster(3) as (coordinator, _), CoordinatorClient(coordinator.address) as client:
        assert client.status().phase == "active"
        client.scale(2, by="ops")
        until(lambda: client.status().phase == "active" and client.status().generation == 2)
        assert members(coordinator) == ["w0", "w1"]
        assert client.status().desired_workers == 2
        client.remove("w0", by="ops")
        for view in client.watch():
            if view.generation == 3 and view.phase == "active":
                break
        assert members(coordinator) == ["w1"]


def test_a_worker_without_a_coordinator_says_so_in_bounded_time():
    worker = ElasticWorker(WorkerId("w", "127.0.0.1", 0), CONFIG)
    with pytest.raises(UnavailableError, match="no coordinator accepted"):
        worker.connect_to_cluster("127.0.0.1:9", timeout=0.3)


def test_a_taken_name_is_refused_at_connection():
    with cluster(1) as (coordinator, _):
        twin = ElasticWorker(WorkerId("w0", "127.0.0.1", 0), CONFIG)
        with pytest.raises(ConflictError, match="a connected worker has the id w0"):
            twin.connect_to_cluster(coordinator.address)
        assert coordinator.status().generation == 1
