"""What the supervisor does when machines, not scripts, fail."""

from __future__ import annotations

import signal

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.launch.supervisor.events import (
    CoordinatorStarted,
    GenerationFormed,
    HostNotice,
    StopRequested,
    Tick,
    WorkerExited,
    WorkerJoined,
    WorkerReleased,
    WorkerStarted,
    WorkerUnplaceable,
    WorkerVanished,
)
from tensorforge.launch.supervisor.instructions import (
    Abandon,
    End,
    Kill,
    Retire,
    Say,
    StartWorker,
)
from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy
from tensorforge.launch.supervisor.supervisor import Supervisor


def tell(supervisor, *events, now=0.0):
    done = [step for event in events for step in supervisor.handle(event, now)]
    return [step for step in done if not isinstance(step, Say)]


def pending(**settings) -> Supervisor:
    """A run whose workers wait for a place."""
    supervisor = Supervisor(SupervisionPolicy(**settings))
    supervisor.begin()
    tell(supervisor, CoordinatorStarted("a", 1))
    return supervisor


def training(**settings) -> Supervisor:
    """A run whose workers train, each on a machine of its own: worker-0 on host-0."""
    supervisor = pending(**settings)
    names = supervisor.workers
    for number, name in enumerate(names):
        placed = WorkerStarted(name, number, f"host-{number}")
        tell(supervisor, placed, WorkerJoined(name))
    tell(supervisor, GenerationFormed(1, names), CommittedStep(step=1))
    return supervisor


def test_the_time_to_join_begins_with_the_place():
    supervisor = pending(workers=1, join_timeout=10.0)
    assert tell(supervisor, Tick(), now=1000.0) == []
    tell(supervisor, WorkerStarted("worker-0", 7, "h"), now=1000.0)
    assert supervisor.deadline() == 1010.0


def test_a_vanished_worker_is_abandoned_and_replaced_at_once():
    supervisor = training(workers=2)
    done = tell(supervisor, WorkerVanished("worker-1", "its node is silent"))
    assert done == [Abandon("worker-1"), StartWorker("worker-2")]
    assert "worker-1" not in supervisor.workers


def test_a_late_exit_of_a_vanished_worker_changes_nothing():
    supervisor = training(workers=2)
    tell(supervisor, WorkerVanished("worker-1", "r"))
    assert tell(supervisor, WorkerExited("worker-1", -9), WorkerReleased("worker-1")) == []


def test_machines_that_fail_spend_no_restarts_of_the_script():
    supervisor = training(workers=2, max_restarts=1, max_host_failures=5)
    for name in ("worker-1", "worker-2", "worker-3"):
        tell(supervisor, WorkerVanished(name, "r"), CommittedStep(step=2))
    done = tell(supervisor, WorkerExited("worker-4", -9))
    assert done == [StartWorker("worker-5")]


def test_the_script_spends_no_host_failures():
    supervisor = training(workers=2, max_restarts=5, max_host_failures=1)
    tell(supervisor, WorkerExited("worker-1", -9), CommittedStep(step=2))
    assert StartWorker("worker-3") in tell(supervisor, WorkerUnplaceable("worker-2", "full"))


def test_without_host_failures_left_the_run_goes_on_with_fewer():
    supervisor = training(workers=2, max_host_failures=0)
    assert tell(supervisor, WorkerVanished("worker-1", "r")) == [Abandon("worker-1")]
    assert supervisor.workers == ("worker-0",)


def test_a_run_that_finds_no_place_at_all_ends_with_the_reason():
    supervisor = pending(workers=1, max_host_failures=0)
    done = tell(supervisor, WorkerUnplaceable("worker-0", "no node has 9 GPU"))
    (outcome,) = [step.outcome for step in done if isinstance(step, End)]
    assert outcome.code == 1
    assert "worker-0 found no place (no node has 9 GPU)" in outcome.reason


def test_placing_again_waits_longer_after_each_refusal():
    supervisor = pending(workers=1)
    assert tell(supervisor, WorkerUnplaceable("worker-0", "r")) == [StartWorker("worker-1")]
    assert tell(supervisor, WorkerUnplaceable("worker-1", "r")) == []
    assert supervisor.deadline() == 0.5
    assert tell(supervisor, Tick(), now=0.5) == [StartWorker("worker-2")]


def test_a_noticed_worker_leaves_and_none_is_started_on_its_machine():
    supervisor = training(workers=2)
    done = tell(supervisor, HostNotice("worker-1", 60.0, "preempted"))
    assert done == [Retire("worker-1"), StartWorker("worker-2", frozenset({"host-1"}))]
    assert tell(supervisor, HostNotice("worker-1", 59.0)) == []
    assert tell(supervisor, WorkerReleased("worker-1"), WorkerExited("worker-1", 0)) == []


def test_a_noticed_worker_is_killed_at_the_deadline_if_that_is_sooner():
    supervisor = training(workers=2, stop_timeout=30.0)
    tell(supervisor, HostNotice("worker-1", 5.0))
    assert tell(supervisor, Tick(), now=4.9) == []
    assert tell(supervisor, Tick(), now=5.0) == [Kill("worker-1")]


def test_a_worker_that_vanishes_after_its_notice_costs_nothing():
    supervisor = training(workers=2, max_host_failures=0)
    tell(supervisor, HostNotice("worker-1", 5.0))
    assert tell(supervisor, WorkerVanished("worker-1", "gone")) == [Abandon("worker-1")]
    assert supervisor.workers == ("worker-0", "worker-2")


def test_a_stop_does_not_wait_for_workers_that_vanished_or_have_no_place():
    supervisor = training(workers=2)
    tell(supervisor, StopRequested(signal.SIGINT))
    tell(supervisor, WorkerVanished("worker-0", "r"))
    done = tell(supervisor, WorkerUnplaceable("worker-1", "cancelled"))
    assert any(isinstance(step, End) for step in done)


def test_news_of_a_stranger_is_harmless():
    supervisor = training(workers=1)
    assert tell(supervisor, WorkerUnplaceable("x", "r"), HostNotice("x", 1.0)) == []
    assert tell(supervisor, WorkerStarted("x", 1, "h")) == []
