import pytest

from tensorforge.launch.supervisor.exit_reasons import ExitReasons
from tensorforge.launch.supervisor.instructions import Retire, Say, SetTarget, StartWorker
from tensorforge.launch.supervisor.staffing import SHRINK_TIMEOUT, Staffing
from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy


def staffed(**settings) -> Staffing:
    """As many workers as the policy asks for, all started at 0 and known to the coordinator."""
    staffing = Staffing(SupervisionPolicy(**settings), ExitReasons())
    staffing.reconcile(0.0)
    for name in staffing.workers:
        staffing.worker_joined(name)
    return staffing


def done(instructions):
    return [step for step in instructions if not isinstance(step, Say)]


def test_workers_and_standbys_are_started_under_the_names_that_were_foretold():
    staffing = Staffing(SupervisionPolicy(workers=1, standbys=1), ExitReasons())
    names = staffing.next_names(2)
    assert staffing.reconcile(0.0) == [StartWorker(name) for name in names]
    assert list(staffing.workers) == names
    assert staffing.reconcile(0.0) == []


def test_a_failed_worker_is_owed_until_its_backoff_is_over():
    staffing = staffed(workers=2)
    del staffing.workers["worker-0"]
    assert staffing.worker_failed(1.0)
    assert staffing.reconcile(1.0) == [StartWorker("worker-2")]
    del staffing.workers["worker-2"]
    assert staffing.worker_failed(1.0)
    assert min(staffing.deadlines()) == 1.5
    assert staffing.reconcile(1.4) == []
    assert staffing.reconcile(1.5) == [StartWorker("worker-3")]


def test_a_committed_step_makes_the_next_failure_the_first_in_a_row():
    staffing = staffed(workers=1)
    for name in ("worker-0", "worker-1"):
        del staffing.workers[name]
        staffing.worker_failed(1.0)
        assert len(staffing.reconcile(1.0)) == 1
        staffing.step_committed()


def test_without_budget_a_failed_worker_is_forfeited_until_another_number_is_asked_for():
    staffing = staffed(workers=3, max_restarts=0)
    del staffing.workers["worker-0"]
    assert not staffing.worker_failed(1.0)
    assert (staffing.target, staffing.reachable) == (3, 2)
    assert staffing.reconcile(1.0) == []
    staffing.operator_wants(4, 2.0)
    assert staffing.reachable == 4
    assert staffing.reconcile(2.0) == [StartWorker("worker-3"), StartWorker("worker-4")]


def test_standbys_are_forfeited_before_those_who_train():
    staffing = staffed(workers=2, standbys=1, max_restarts=0)
    reachable = []
    for _ in range(2):
        staffing.worker_failed(1.0)
        reachable.append(staffing.reachable)
    assert reachable == [2, 1]


def test_an_exit_that_may_yet_be_explained_counts_as_a_worker_that_is_there():
    exit_reasons = ExitReasons()
    staffing = Staffing(SupervisionPolicy(workers=2), exit_reasons)
    staffing.reconcile(0.0)
    del staffing.workers["worker-1"]
    exit_reasons.exited("worker-1", 1.0, anybody_joined=True)
    assert staffing.reconcile(1.0) == []
    assert done(staffing.worker_released("worker-1", "it asked to", 1.0, surplus=False)) == [
        SetTarget(1)
    ]
    assert staffing.reconcile(1.0) == []


def test_surplus_workers_are_retired_if_the_coordinator_lets_nobody_go_in_time():
    staffing = staffed(workers=3)
    staffing.operator_wants(2, 1.0)
    assert staffing.reconcile(1.0) == []
    assert min(staffing.deadlines()) == 1.0 + SHRINK_TIMEOUT
    assert staffing.reconcile(1.0 + SHRINK_TIMEOUT) == [Retire("worker-2")]


@pytest.mark.parametrize(("asked", "local"), [(9, 3), (4, 3), (3, 2), (1, 1)])
def test_of_what_is_asked_for_the_guests_are_a_part_within_the_limits(asked, local):
    staffing = staffed(workers=2, min_workers=2, max_workers=4)
    assert done(staffing.worker_joined("far-1")) == [SetTarget(3)]
    staffing.operator_wants(asked, 1.0)
    assert staffing.target == local


def test_a_leave_after_a_smaller_number_counts_even_if_there_are_too_many_by_then():
    staffing = staffed(workers=3)
    staffing.operator_wants(2, 1.0)
    assert done(staffing.worker_released("worker-0", "it asked to", 1.0, surplus=False)) == [
        SetTarget(1)
    ]


def test_an_exit_that_only_the_worker_explains_counts_unless_there_are_enough():
    staffing = staffed(workers=3)
    del staffing.workers["worker-0"]
    assert done(staffing.worker_left("worker-0")) == [SetTarget(2)]
    del staffing.workers["worker-1"]
    staffing.operator_wants(1, 1.0)
    assert done(staffing.worker_left("worker-1")) == []


def test_a_worker_that_left_before_a_number_was_asked_for_is_replaced():
    staffing = staffed(workers=2)
    assert done(staffing.worker_released("worker-1", "it asked to", 1.0, surplus=True)) == []
    assert staffing.reconcile(1.0) == [StartWorker("worker-2")]


@pytest.mark.parametrize("wanted", [2, 3])
def test_the_number_that_knows_of_a_guests_leave_is_for_those_who_are_started_here(wanted):
    staffing = staffed(workers=2)
    staffing.worker_joined("far-1")
    staffing.operator_wants(wanted, 1.0)
    assert done(staffing.worker_released("far-1", "fewer are wanted", 1.0, surplus=True)) == []
    assert staffing.target == wanted


def test_a_closed_staffing_asks_for_nobody_and_waits_for_nothing():
    staffing = staffed(workers=2, join_timeout=None)
    staffing.worker_failed(1.0)
    staffing.operator_wants(1, 1.0)
    staffing.close()
    assert list(staffing.deadlines()) == []
    assert done(staffing.worker_joined("far-1")) == []
    assert staffing.worker_released("worker-0", "", 1.0, surplus=False) == []
