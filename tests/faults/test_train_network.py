"""Training without its coordinator for a while, and on both sides of a split network.

The workers train until they are told to stop, so nothing here depends on how fast the machine is; what
they have got by then must be what an undisturbed run has after as many steps.
"""

import contextlib
import itertools
import os
import time

import pytest
from tests.faults.endless_training import (
    commits,
    endless_work,
    newest,
    start_together,
    stop_and_compare,
)

from tensorforge.elastic import CoordinatorClient
from tensorforge.errors import UnavailableError
from tensorforge.testing.network_namespace import enter_namespace

CONFIG = {"rescale_timeout_ms": 60_000}


def work_on_hosts(namespaces):
    """Trains the test model, each worker on the host that it belongs to."""
    name = os.environ["TENSORFORGE_WORKER_ID"]
    if name in namespaces:
        enter_namespace(namespaces[name])
    endless_work("mlp", "sgd", {})


@contextlib.contextmanager
def observed(running):
    """A function that looks at the cluster; `None` while the coordinator is away."""
    with CoordinatorClient(running.address, token=running.token) as client:

        def look():
            with contextlib.suppress(UnavailableError):
                return client.status()

        yield look


def trains(view, *names):
    """Whether exactly these are members and have committed a step together."""
    if view is None or view.phase != "active":
        return False
    members = {worker.id for worker in view.workers if worker.rank >= 0}
    return members == set(names) and view.rescales[-1].first_commit_ms is not None


def stop_and_check(running, alone, *names):
    return stop_and_compare(running, alone, "mlp", "sgd", *names)


def survive_an_outage(cluster, alone, seconds):
    with cluster(main=work_on_hosts, arguments=({},), workers=3, config=CONFIG) as running:
        for name in "abc":
            running.start_worker(name)
        with observed(running) as look:
            running.wait_until(lambda: trains(look(), *"abc"), "all three train")
            generation = look().generation
        running.kill_coordinator()
        killed_at, before = time.time(), running.committed_step()
        time.sleep(seconds)  # the outage itself: nothing happens that one could wait for
        after = running.committed_step()
        running.start_coordinator()
        with observed(running) as look:

            def are_all_back():
                view = look()
                return view and sum(w.is_connected for w in view.workers) == 3

            running.wait_until(are_all_back, "everybody is back")
            view = look()
            assert (view.phase, view.generation) == ("active", generation), running.describe()
            running.wait_until(lambda: look().state.step > after, "progress is reported again")
        outage = [e for e in commits(running, "a") if killed_at < e["time"] < killed_at + seconds]
        longest = max(b["time"] - a["time"] for a, b in itertools.pairwise(outage))
        assert after - before > seconds, "steps were committed all the while"
        assert running.living() == {"a", "b", "c"}
        total = stop_and_check(running, alone, "a", "b", "c")
        formed = [e["generation"] for e in running.events() if e["kind"] == "formed"]
        assert max(formed) == generation, "nobody formed again"
        print(
            f"coordinator away for {seconds} s: {after - before} steps committed meanwhile, the longest gap "
            f"{longest:.3f} s; {total} steps in all, digest and ledger as undisturbed"
        )


def test_training_goes_on_without_its_coordinator_for_longer_than_any_timeout(cluster, alone):
    survive_an_outage(cluster, alone, 5)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_training_goes_on_while_the_coordinator_is_down_for_half_a_minute(cluster, alone):
    survive_an_outage(cluster, alone, 30)


def test_a_minority_that_is_cut_off_commits_nothing_and_comes_back_as_newcomers(
    cluster, alone, distant_host
):
    places = {"c": distant_host.namespace}
    with cluster(
        main=work_on_hosts, arguments=(places,), workers=3, config=CONFIG, host=distant_host.here
    ) as running:
        start_together(running, "a", "b", "c")
        generation = max(event["generation"] for event in commits(running, "a"))
        distant_host.pull()
        running.wait_until(
            lambda: max(e["generation"] for e in commits(running, "a")) > generation,
            "a and b go on",
        )
        alone_since = newest(running, "a", "b")
        minority = commits(running, "c")
        running.wait_until(lambda: newest(running, "a", "b") > alone_since + 50, "they train")
        assert commits(running, "c") == minority, "the minority commits nothing"
        assert newest(running, "c") <= alone_since
        distant_host.plug()
        running.wait_until(lambda: newest(running, "c") > alone_since + 50, "c is back")
        healed = [e for e in running.events() if e["kind"] == "formed" and e["worker"] == "c"][-1]
        assert healed["moved"]["state_bytes"] > 0
        stop_and_check(running, alone, "a", "b", "c")


def test_nobody_takes_over_while_all_members_train_out_of_the_coordinators_sight(
    cluster, alone, distant_host
):
    places = {"a": distant_host.namespace, "b": distant_host.namespace}
    with (
        cluster(
            main=work_on_hosts,
            arguments=(places,),
            workers=None,
            config=CONFIG,
            host=distant_host.here,
        ) as running,
        observed(running) as look,
    ):
        running.start_worker("a")
        running.start_worker("b")
        running.wait_until(
            lambda: max(newest(running, "a"), newest(running, "b")) >= 20, "training"
        )
        running.wait_until(lambda: len(look().workers) == 2, "both are members")
        distant_host.pull()
        running.start_worker("n")

        def is_stuck():
            view = look()
            ids = {worker.id for worker in (*view.workers, *view.waiting)}
            return view.phase == "paused" and ids == {"n"}

        running.wait_until(is_stuck, "the coordinator sees only the newcomer")
        unseen_since = newest(running, "a", "b")
        running.wait_until(lambda: newest(running, "a", "b") > unseen_since + 100, "they train on")
        assert is_stuck()
        assert "may still be training" in look().rescales[-1].reason
        assert not commits(running, "n"), "a newcomer starts no second group"
        distant_host.plug()
        running.wait_until(lambda: newest(running, "n") > unseen_since + 100, "n joined them")
        running.wait_until(lambda: trains(look(), "a", "b", "n"), "all three train")
        stop_and_check(running, alone, "a", "b", "n")
