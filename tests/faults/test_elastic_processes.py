"""The control plane with real processes that are killed, frozen, told to go, and cut off."""

import contextlib
import signal

import pytest

from tensorforge.elastic import ElasticTrainingConfig
from tensorforge.testing.network_namespace import DistantHost
from tensorforge.testing.process_cluster import ProcessCluster
from tensorforge.testing.proxy import Proxy

CONFIG = ElasticTrainingConfig(
    stability_window_ms=200,
    worker_heartbeat_timeout_ms=1_500,
    rescale_timeout_ms=30_000,
    failure_tolerance_percentage=100,
    max_consecutive_failures=20,
)


@contextlib.contextmanager
def cluster(folder, workers, config=CONFIG):
    with ProcessCluster(folder, config, desired_workers=workers or None) as local:
        local.start_coordinator()
        names = [f"w{index}" for index in range(workers)]
        for name in names:
            local.start_worker(name)
        if workers:
            local.wait_until_active(set(names))
        yield local


def formations(worker):
    return [event for event in worker.events() if event["what"] == "formed"]


def test_a_killed_worker_is_noticed_at_once_and_the_others_go_on(tmp_path):
    with cluster(tmp_path, 3) as local:
        before = local.status().generation
        local.workers["w1"].signal(signal.SIGKILL)
        view = local.wait_until_active({"w0", "w2"})
        record = view.rescales[-1]
        assert record.urgent
        assert "its stream broke" in str(record.removed["w1"])
        assert view.generation == before + 1
        assert local.workers["w0"].process.poll() is None


def test_a_frozen_worker_is_fenced_and_comes_back_as_a_newcomer(tmp_path):
    with cluster(tmp_path, 3) as local:
        local.workers["w1"].signal(signal.SIGSTOP)
        local.wait_until_active({"w0", "w2"})
        local.workers["w1"].signal(signal.SIGCONT)
        view = local.wait_until_active({"w0", "w1", "w2"})
        assert "w1" in view.rescales[-1].added
        events = local.workers["w1"].events()
        assert [event["what"] for event in events][-4:] == ["formed", "fenced", "told", "formed"]
        assert events[-1]["newcomers"] == ["w1"]
        assert local.workers["w1"].process.poll() is None


def test_a_worker_that_is_told_to_go_leaves_without_a_failure(tmp_path):
    with cluster(tmp_path, 3) as local:
        local.workers["w0"].signal(signal.SIGTERM)
        assert local.workers["w0"].process.wait(30) == 0
        view = local.wait_until_active({"w1", "w2"})
        assert not view.rescales[-1].urgent
        assert "SIGTERM" in view.rescales[-1].reason
        assert view.losses == 0


def test_a_killed_coordinator_goes_on_where_it_ended_and_workers_never_notice(tmp_path):
    with cluster(tmp_path, 3) as local:
        before = local.status().generation
        formed = {name: formations(worker) for name, worker in local.workers.items()}
        port = local.kill_coordinator()
        local.start_coordinator(port)
        local.wait_until(lambda: sum(w.is_connected for w in local.status().workers) == 3, "back")
        step = local.status().state.step
        local.wait_until(lambda: local.status().state.step > step, "training goes on")
        view = local.status()
        assert (view.generation, view.phase) == (before, "active")
        assert formed == {name: formations(worker) for name, worker in local.workers.items()}


def test_a_worker_lost_while_the_coordinator_was_away_is_noticed(tmp_path):
    with cluster(tmp_path, 3) as local:
        before = local.status().generation
        port = local.kill_coordinator()
        local.workers["w2"].signal(signal.SIGKILL)
        local.workers["w2"].process.wait()
        local.start_coordinator(port)
        view = local.wait_until_active({"w0", "w1"})
        assert view.generation == before + 1
        assert "did not come back" in str(view.rescales[-1].removed["w2"])


def test_a_worker_behind_a_cut_network_is_replaced_and_rejoins_when_it_heals(tmp_path):
    with ProcessCluster(tmp_path, CONFIG, desired_workers=3) as local:
        local.start_coordinator()
        with Proxy(local.address) as proxy:
            local.start_worker("far", address=proxy.address)
            local.start_worker("near0")
            local.start_worker("near1")
            before = local.wait_until_active({"far", "near0", "near1"}).generation
            proxy.cut()
            local.wait_until_active({"near0", "near1"})
            assert local.workers["far"].process.poll() is None
            proxy.heal()
            view = local.wait_until_active({"far", "near0", "near1"})
            assert view.generation == before + 2
            assert "fenced" in [event["what"] for event in local.workers["far"].events()]
            local.close()


def test_the_coordinator_survives_while_most_of_its_workers_die_at_once(tmp_path):
    with cluster(tmp_path, 5) as local:
        for name in ("w0", "w2", "w4"):
            local.workers[name].signal(signal.SIGKILL)
        view = local.wait_until_active({"w1", "w3"})
        assert view.consecutive_failures == 0
        assert sorted(worker.rank for worker in view.workers) == [0, 1]


def test_a_host_whose_cable_is_pulled_is_replaced_and_rejoins(tmp_path):
    if not DistantHost.is_possible():
        pytest.skip("this machine gives us no network namespaces; the proxy test covers the cut")
    with DistantHost() as host, ProcessCluster(tmp_path, CONFIG, 2, host.here) as local:
        local.start_coordinator()
        local.start_worker("here")
        local.start_worker("there", prefix=("ip", "netns", "exec", host.namespace))
        local.wait_until_active({"here", "there"})
        host.pull()
        local.wait_until_active({"here"})
        host.plug()
        view = local.wait_until_active({"here", "there"})
        assert view.rescales[-1].added == ("there",)
