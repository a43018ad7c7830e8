import signal

import pytest

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.launch.supervisor.coordinator_restart import LONGEST_PAUSE
from tensorforge.launch.supervisor.events import (
    CoordinatorExited,
    CoordinatorStarted,
    GenerationFormed,
    StacksDumped,
    StopRequested,
    TargetChanged,
    Tick,
    TrainingAborted,
    TrainingFinished,
    TrainingResumed,
    WorkerConcluded,
    WorkerExited,
    WorkerJoined,
    WorkerLost,
    WorkerReleased,
    WorkerStarted,
)
from tensorforge.launch.supervisor.exit_codes import UserFailure
from tensorforge.launch.supervisor.exit_reasons import EXPLANATION_TIMEOUT, NOBODY_JOINED_TIMEOUT
from tensorforge.launch.supervisor.hangs import DUMP_TIMEOUT
from tensorforge.launch.supervisor.instructions import (
    DumpStacks,
    End,
    Kill,
    Retire,
    Say,
    SetTarget,
    StartCoordinator,
    StartWorker,
    StopCoordinator,
    StopTraining,
)
from tensorforge.launch.supervisor.shutdown import CONFIRMATION_TIMEOUT
from tensorforge.launch.supervisor.stacks import script_stack
from tensorforge.launch.supervisor.staffing import SHRINK_TIMEOUT
from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy
from tensorforge.launch.supervisor.supervisor import Supervisor
from tensorforge.testing.clock import ManualClock


class Driver:
    """A supervisor with a clock; keeps what it was told and what was said."""

    def __init__(self, **settings):
        self.clock = ManualClock()
        self.supervisor = Supervisor(SupervisionPolicy(**settings))
        self.said: list[str] = []
        self.details: list[str] = []
        self.outcome = None
        assert self.supervisor.begin() == [StartCoordinator()]

    def tell(self, *events):
        done = []
        for event in events:
            done += self.supervisor.handle(event, self.clock())
        self.said += [step.text for step in done if isinstance(step, Say)]
        self.details += [step.detail for step in done if isinstance(step, Say) and step.detail]
        self.outcome = next((s.outcome for s in done if isinstance(s, End)), self.outcome)
        return [step for step in done if not isinstance(step, Say)]

    def wait(self, seconds):
        self.clock.advance(seconds)
        return self.tell(Tick())


def up(**settings) -> Driver:
    """A run whose workers have joined and committed a step."""
    driver = Driver(**settings)
    driver.tell(CoordinatorStarted("127.0.0.1:1", 9))
    members = tuple(driver.supervisor.workers)
    driver.tell(*(WorkerJoined(name) for name in members), GenerationFormed(1, members))
    driver.tell(CommittedStep(step=1))
    return driver


def failure(kind="ValueError", where="train.py:7 in f") -> UserFailure:
    return UserFailure(kind=kind, message="no", where=where, traceback="Traceback …\n")


def test_workers_start_when_the_coordinators_address_is_known():
    driver = Driver(workers=2, standbys=1)
    assert driver.tell(Tick()) == []
    assert driver.tell(CoordinatorStarted("127.0.0.1:1", 9)) == [
        SetTarget(2),
        StartWorker("worker-0"),
        StartWorker("worker-1"),
        StartWorker("worker-2"),
    ]


def test_a_killed_worker_is_replaced_at_once():
    driver = up(workers=2)
    assert driver.tell(WorkerExited("worker-0", -9)) == [StartWorker("worker-2")]
    assert "worker-0 was killed by SIGKILL" in driver.said[-1]
    assert "9 of 10 restarts left" in driver.said[-1]


def test_with_standbys_there_is_one_process_more_and_it_is_kept_so():
    driver = up(workers=2, standbys=1)
    assert driver.supervisor.workers == ("worker-0", "worker-1", "worker-2")
    assert driver.tell(WorkerExited("worker-1", -9)) == [StartWorker("worker-3")]


def test_a_crash_loop_slows_down_and_progress_forgives_it():
    driver = up(workers=3)
    driver.tell(WorkerExited("worker-0", -11))
    assert driver.tell(WorkerExited("worker-3", -11)) == []
    assert driver.supervisor.deadline() == driver.clock() + 0.5
    assert driver.wait(0.5) == [StartWorker("worker-4")]
    driver.tell(CommittedStep(step=2))
    assert driver.tell(WorkerExited("worker-4", -11)) == [StartWorker("worker-5")]


def test_without_budget_the_run_goes_on_with_fewer():
    driver = up(workers=3, min_workers=2, max_restarts=0)
    assert driver.tell(WorkerExited("worker-0", -9)) == []
    assert "restart budget is spent" in driver.said[-1]
    assert "going on with 2" in driver.said[-1]
    assert driver.outcome is None


def test_without_budget_below_the_minimum_the_run_ends():
    driver = up(workers=2, min_workers=2, max_restarts=1)
    driver.tell(WorkerExited("worker-0", -9), WorkerJoined("worker-2"), CommittedStep(step=2))
    assert driver.tell(WorkerExited("worker-1", -9)) == [StopTraining("worker-2")]
    assert driver.tell(WorkerExited("worker-2", 0))[-1] == End(driver.outcome)
    assert driver.outcome.code == 1
    assert "restart budget is spent (1 in 3600 s)" in driver.outcome.reason
    assert "min_workers (2)" in driver.outcome.reason


def test_the_budget_refills_with_time():
    driver = up(workers=2, max_restarts=1, restart_window=60.0, hang_timeout=None)
    driver.tell(WorkerExited("worker-0", -9))
    driver.wait(60.0)
    driver.tell(CommittedStep(step=2))
    assert driver.tell(WorkerExited("worker-1", -9)) == [StartWorker("worker-3")]


def test_asking_for_more_starts_more_within_the_limits():
    driver = up(workers=2, max_workers=4)
    assert driver.tell(TargetChanged(9)) == [StartWorker("worker-2"), StartWorker("worker-3")]
    driver.tell(WorkerExited("worker-2", -9))
    assert "9 of 10 restarts left" in driver.said[-1]


def test_asking_for_fewer_leaves_the_choice_to_the_coordinator():
    driver = up(workers=3)
    assert driver.tell(TargetChanged(2), WorkerReleased("worker-0", surplus=True)) == []
    assert driver.supervisor.target == 2
    assert driver.tell(WorkerExited("worker-0", 0)) == []
    assert driver.wait(SHRINK_TIMEOUT) == []
    assert driver.supervisor.workers == ("worker-1", "worker-2")


def test_if_the_coordinator_lets_nobody_go_the_newest_are_retired():
    driver = up(workers=3)
    driver.tell(TargetChanged(1))
    assert driver.supervisor.deadline() == driver.clock() + SHRINK_TIMEOUT
    assert driver.wait(SHRINK_TIMEOUT) == [Retire("worker-1"), Retire("worker-2")]


def test_a_worker_from_elsewhere_comes_on_top_of_the_local_ones():
    driver = up(workers=2, max_workers=4)
    assert driver.tell(WorkerJoined("far-1")) == [SetTarget(3)]
    assert driver.tell(TargetChanged(3), WorkerJoined("far-1")) == []
    assert driver.tell(TargetChanged(2)) == []
    assert driver.supervisor.target == 1
    assert driver.tell(TargetChanged(4)) == [StartWorker("worker-2")]
    assert driver.supervisor.target == 3
    assert driver.tell(WorkerLost("far-1", "its stream broke")) == [SetTarget(3)]
    assert driver.tell(TargetChanged(3)) == []


def test_beyond_the_maximum_a_worker_from_elsewhere_stands_by():
    driver = up(workers=2, max_workers=2)
    assert driver.tell(WorkerJoined("far-1")) == [SetTarget(2)]


def test_a_released_worker_that_does_not_go_is_killed():
    driver = up(workers=2, stop_timeout=5.0)
    driver.tell(TargetChanged(1), WorkerReleased("worker-1", surplus=True))
    assert driver.wait(4.9) == []
    assert driver.wait(0.1) == [Kill("worker-1")]
    assert driver.tell(WorkerExited("worker-1", -9)) == []


def test_a_worker_that_was_asked_to_leave_is_not_replaced_and_one_fewer_is_wanted():
    driver = up(workers=3)
    done = driver.tell(WorkerReleased("worker-1"), WorkerExited("worker-1", 0))
    assert done == [SetTarget(2)]
    assert driver.tell(WorkerReleased("worker-1")) == []
    assert driver.tell(TargetChanged(2)) == []
    assert driver.supervisor.target == 2


def test_at_the_minimum_a_worker_that_leaves_is_replaced():
    driver = up(workers=2, min_workers=2)
    assert driver.tell(WorkerReleased("worker-1")) == [SetTarget(2), StartWorker("worker-2")]


def test_the_exit_may_be_seen_before_the_release():
    driver = up(workers=3)
    assert driver.tell(WorkerExited("worker-1", 0)) == []
    assert driver.tell(WorkerReleased("worker-1")) == [SetTarget(2)]
    assert driver.wait(EXPLANATION_TIMEOUT) == []
    assert driver.supervisor.workers == ("worker-0", "worker-2")


def test_a_worker_that_retires_because_fewer_are_wanted_takes_nobody_along():
    driver = up(workers=3)
    driver.tell(WorkerExited("worker-1", -9))
    done = driver.tell(TargetChanged(2), WorkerReleased("worker-2", "fewer", surplus=True))
    assert done == []
    assert driver.supervisor.target == 2
    assert driver.supervisor.workers == ("worker-0", "worker-2", "worker-3")
    assert driver.tell(WorkerExited("worker-2", 0)) == []


def test_a_standby_that_is_asked_to_leave_leaves_the_number_alone():
    driver = up(workers=2, standbys=1)
    driver.tell(GenerationFormed(1, ("worker-0", "worker-1")))
    assert driver.tell(WorkerReleased("worker-2")) == [StartWorker("worker-3")]
    assert driver.supervisor.target == 2


def test_while_the_coordinator_is_away_nobody_has_to_explain_an_exit():
    driver = up(workers=2)
    driver.tell(CoordinatorExited(-9), WorkerExited("worker-1", 0))
    assert driver.wait(10 * EXPLANATION_TIMEOUT) == []
    driver.tell(CoordinatorStarted("a", 2))
    assert driver.wait(EXPLANATION_TIMEOUT - 1) == []
    assert driver.tell(WorkerReleased("worker-1")) == [SetTarget(1)]


def test_a_worker_that_says_that_it_left_has_not_failed():
    driver = up(workers=2)
    driver.tell(WorkerConcluded("worker-1", "left"), WorkerExited("worker-1", 0))
    assert driver.wait(EXPLANATION_TIMEOUT) == [SetTarget(1)]
    assert driver.said[-1] == "worker-1 left; 1 worker wanted now"


def test_a_worker_that_ends_early_for_no_reason_has_failed():
    driver = up(workers=2)
    assert driver.tell(WorkerExited("worker-1", 0)) == []
    assert driver.wait(EXPLANATION_TIMEOUT) == [StartWorker("worker-2")]
    assert "before the training was complete" in driver.said[-1]


def test_a_script_that_never_trains_ends_the_run():
    driver = Driver(workers=2)
    driver.tell(CoordinatorStarted("a", 1), WorkerExited("worker-0", 0))
    assert driver.wait(NOBODY_JOINED_TIMEOUT) == [Kill("worker-1")]
    driver.tell(WorkerExited("worker-1", 0))
    assert driver.outcome.code == 1
    assert "ended without training" in driver.outcome.reason


def test_training_that_finished_ends_with_success():
    driver = up(workers=2)
    assert driver.tell(TrainingFinished("4 epochs"), WorkerExited("worker-0", 0)) == []
    assert driver.tell(WorkerExited("worker-1", 0)) == [StopCoordinator(), End(driver.outcome)]
    assert (driver.outcome.code, driver.outcome.reason) == (0, "4 epochs")


def test_exits_before_the_news_of_the_finish_are_explained_by_it():
    driver = up(workers=2)
    assert driver.tell(WorkerExited("worker-0", 0), WorkerExited("worker-1", 0)) == []
    driver.tell(TrainingFinished())
    assert driver.outcome.code == 0


def test_who_lingers_after_the_finish_is_killed_and_the_run_is_still_a_success():
    driver = up(workers=1, stop_timeout=5.0)
    driver.tell(TrainingFinished())
    assert driver.wait(2.5) == [Retire("worker-0")]
    assert driver.wait(2.5) == [Kill("worker-0")]
    driver.tell(WorkerExited("worker-0", -9))
    assert driver.outcome.code == 0


def test_an_exception_before_training_ends_the_run_at_once():
    driver = Driver(workers=2)
    driver.tell(CoordinatorStarted("a", 1))
    assert driver.tell(WorkerExited("worker-1", 1, failure())) == [Kill("worker-0")]
    driver.tell(WorkerExited("worker-0", -9))
    assert driver.outcome.reason == "worker-1 raised ValueError: no (train.py:7 in f)"
    assert driver.outcome.failure.traceback == "Traceback …\n"


def test_an_exception_in_training_is_forgiven_once_and_ends_the_run_the_second_time():
    driver = up(workers=2)
    assert driver.tell(WorkerExited("worker-1", 1, failure())) == [StartWorker("worker-2")]
    driver.tell(WorkerJoined("worker-2"), CommittedStep(step=2))
    other = failure("OSError", "io.py:1 in read")
    assert driver.tell(WorkerExited("worker-2", 1, other)) == [StartWorker("worker-3")]
    assert driver.tell(WorkerExited("worker-3", 1, failure())) == [StopTraining("worker-0")]
    driver.tell(WorkerExited("worker-0", 0))
    assert driver.outcome.code == 1
    assert driver.outcome.reason.endswith(", again")


def test_the_end_of_a_run_names_the_exception_behind_it_whichever_is_heard_first():
    for order in (0, 1):
        driver = up(workers=2)
        news = [TrainingAborted("2 of 2 workers lost"), WorkerExited("worker-1", 1, failure())]
        driver.tell(news[order], news[1 - order], WorkerExited("worker-0", 0))
        for name in driver.supervisor.workers:
            driver.tell(WorkerExited(name, 0))
        assert driver.outcome.reason == "2 of 2 workers lost"
        assert driver.outcome.failure == failure()


def test_a_run_that_goes_back_says_so_and_is_not_taken_for_a_hang():
    driver = up(workers=1, hang_timeout=60.0)
    driver.wait(59.0)
    driver.tell(TrainingResumed(-1, before=400))
    assert driver.said[-1] == (
        "all workers with the state of step 400 are gone; training starts from the beginning because "
        "there is no checkpoint"
    )
    assert driver.wait(59.0) == []
    driver.tell(TrainingResumed(99))
    assert driver.said[-1] == "training continues from the checkpoint of step 99"


def test_a_coordinator_that_cannot_start_says_why():
    driver = Driver(workers=1)
    driver.tell(CoordinatorExited(1, "cannot listen on 127.0.0.1:1: is it in use?"))
    assert driver.outcome.reason == (
        "the coordinator did not start: cannot listen on 127.0.0.1:1: is it in use?"
    )


def test_a_traceback_is_shown_once_for_each_place_it_comes_from():
    driver = up(workers=4)
    driver.tell(WorkerExited("worker-0", 1, failure()))
    assert driver.details == ["Traceback …"]
    driver.tell(TrainingAborted("too many"))
    others = failure("OSError", "io.py:1 in read"), failure()
    driver.tell(*(WorkerExited(f"worker-{n}", 1, others[n % 2]) for n in (1, 2, 3)))
    driver.tell(WorkerExited("worker-4", 1, failure("TrainingAbortedError")))
    assert driver.details == ["Traceback …"] * 2
    assert driver.outcome.failure == failure()


def test_an_exception_that_ends_the_run_is_left_to_the_end_to_show():
    driver = Driver(workers=3)
    driver.tell(CoordinatorStarted("127.0.0.1:1", 9))
    driver.tell(*(WorkerExited(f"worker-{n}", 1, failure()) for n in range(3)))
    assert driver.details == []
    assert driver.outcome.failure.traceback_shown == "Traceback …"


def test_whoever_the_launcher_ended_was_not_killed_by_someone():
    driver = Driver(workers=2)
    driver.tell(CoordinatorStarted("127.0.0.1:1", 9))
    driver.tell(WorkerExited("worker-0", 1, failure()), WorkerExited("worker-1", -9))
    assert driver.said[-1] == "worker-1 was stopped"
    driver = up(workers=1)
    driver.tell(StopRequested(signal.SIGINT), WorkerExited("worker-0", -signal.SIGTERM))
    assert driver.said[-1] == "worker-0 was stopped"


def test_an_end_by_the_coordinator_tells_what_the_launcher_knows_of_the_deaths():
    driver = up(workers=3)
    driver.tell(WorkerExited("worker-0", -9), TrainingAborted("2 of 3 workers lost"))
    driver.tell(WorkerConcluded("worker-3", "stopped"), WorkerExited("worker-3", 0))
    driver.tell(WorkerExited("worker-1", -11), WorkerExited("worker-2", 0))
    assert driver.outcome.reason == (
        "2 of 3 workers lost. Before: worker-0 was killed by SIGKILL (by someone, or by the kernel because "
        "memory ran out); worker-1 was killed by SIGSEGV (it crashed in native code); "
        "worker-2 ended before the training was complete"
    )


def test_a_hang_is_shown_with_the_stack_of_whoever_hangs_and_no_other():
    driver = up(workers=2, hang_timeout=60.0)
    driver.wait(60.0)
    driver.tell(StacksDumped("worker-0", WAITING), StacksDumped("worker-1", AT_WORK))
    assert driver.details == [script_stack(AT_WORK)]


def test_the_echo_of_an_end_is_no_failure_of_the_script():
    driver = up(workers=2)
    echo = UserFailure(
        kind="TrainingAbortedError", message="too few workers", where="x", traceback=""
    )
    assert driver.tell(WorkerExited("worker-1", 1, echo)) == []
    driver.tell(WorkerExited("worker-0", 1, echo))
    assert driver.outcome is None, "the coordinator has the last word"
    assert driver.supervisor.deadline() == driver.clock() + CONFIRMATION_TIMEOUT
    driver.wait(CONFIRMATION_TIMEOUT)
    assert driver.outcome.reason == "too few workers"
    assert driver.outcome.failure is None


def test_a_late_worker_told_that_training_is_complete_does_not_turn_it_into_a_failure():
    driver = up(workers=2)
    echo = UserFailure(
        kind="TrainingAbortedError", message="training is complete", where="x", traceback=""
    )
    driver.tell(WorkerExited("worker-1", 1, echo), WorkerExited("worker-0", 0))
    assert driver.outcome is None
    driver.tell(TrainingFinished("training is complete"))
    assert (driver.outcome.code, driver.outcome.reason) == (0, "training is complete")


def test_the_coordinators_reason_replaces_the_echo_of_it():
    driver = up(workers=1)
    driver.tell(WorkerExited("worker-0", 1, failure("TrainingAbortedError")))
    driver.tell(TrainingAborted("2 of 2 workers lost"))
    assert (driver.outcome.code, driver.outcome.reason) == (1, "2 of 2 workers lost")


def test_an_impatient_user_does_not_wait_for_the_coordinators_word():
    driver = up(workers=1)
    driver.tell(WorkerExited("worker-0", 1, failure("TrainingAbortedError")))
    driver.tell(StopRequested(signal.SIGINT))
    assert driver.outcome.code == 1


def test_the_first_interrupt_is_graceful_and_the_second_is_not():
    driver = up(workers=2, stop_timeout=30.0)
    asked = driver.tell(StopRequested(signal.SIGINT))
    assert asked == [StopTraining("worker-0"), StopTraining("worker-1")]
    assert driver.tell(WorkerExited("worker-0", 0)) == []
    assert driver.tell(StopRequested(signal.SIGINT)) == [Kill("worker-1")]
    assert driver.tell(WorkerExited("worker-1", -9)) == [StopCoordinator(), End(driver.outcome)]
    assert driver.outcome.code == 130


def test_a_graceful_stop_is_bounded():
    driver = up(workers=1, stop_timeout=30.0)
    driver.tell(StopRequested(signal.SIGTERM))
    assert driver.supervisor.deadline() == driver.clock() + 15.0
    assert driver.wait(15.0) == [Retire("worker-0")]
    assert driver.wait(15.0) == [Kill("worker-0")]
    driver.tell(WorkerExited("worker-0", -9))
    assert driver.outcome.code == 143


def test_training_that_finishes_while_it_is_interrupted_has_finished():
    driver = up(workers=1)
    driver.tell(StopRequested(signal.SIGINT), TrainingFinished())
    driver.tell(WorkerConcluded("worker-0", "complete"), WorkerExited("worker-0", 0))
    assert driver.outcome.code == 0


def test_training_that_stopped_because_it_was_interrupted_has_not_finished():
    driver = up(workers=1)
    driver.tell(StopRequested(signal.SIGINT), TrainingFinished())
    driver.tell(WorkerConcluded("worker-0", "stopped"), WorkerExited("worker-0", 0))
    assert driver.outcome.code == 130


def test_a_worker_that_has_not_joined_yet_is_simply_ended_by_a_stop():
    driver = Driver(workers=1)
    driver.tell(CoordinatorStarted("a", 1))
    assert driver.tell(StopRequested(signal.SIGINT)) == [Retire("worker-0")]


def test_what_the_coordinator_ended_is_over():
    driver = up(workers=1, stop_timeout=30.0)
    assert driver.tell(TrainingAborted("too many failures")) == []
    assert driver.wait(15.0) == [Retire("worker-0")]
    driver.tell(WorkerExited("worker-0", 1))
    assert (driver.outcome.code, driver.outcome.reason) == (1, "too many failures")


def test_a_dead_coordinator_is_started_again():
    driver = up(workers=1)
    driver.clock.advance(100.0)
    assert driver.tell(CoordinatorExited(-9)) == [StartCoordinator()] or (
        driver.wait(0.2) == [StartCoordinator()]
    )
    driver.tell(CoordinatorStarted("127.0.0.1:1", 10))
    assert driver.supervisor.workers == ("worker-0",)


def test_a_coordinator_that_keeps_exiting_is_tried_again_with_a_growing_pause():
    driver = up(workers=1)
    pauses = []
    for _ in range(20):
        driver.tell(CoordinatorExited(1))
        pauses.append(driver.supervisor._coordinator.restart_at or driver.clock())
        pauses[-1] -= driver.clock()
        driver.wait(LONGEST_PAUSE)
    assert driver.outcome is None
    assert driver.supervisor.workers == ("worker-0",)
    assert pauses == sorted(pauses)
    assert max(pauses) == LONGEST_PAUSE


def test_a_coordinator_that_never_came_up_ends_the_run_at_once():
    driver = Driver(workers=1)
    driver.tell(CoordinatorExited(1))
    assert driver.outcome.code == 1


def test_a_worker_that_the_coordinator_gave_up_has_some_time_to_come_back():
    driver = up(workers=2, lost_timeout=10.0)
    driver.tell(WorkerLost("worker-1", "silent for 10 s"))
    driver.wait(9.0)
    driver.tell(WorkerJoined("worker-1"))
    assert driver.wait(9.0) == []
    driver.tell(WorkerLost("worker-1", "silent for 10 s"))
    assert driver.wait(10.0) == [Kill("worker-1")]
    assert driver.tell(WorkerExited("worker-1", -9)) == [StartWorker("worker-2")]
    assert "declared lost by the coordinator (silent for 10 s)" in driver.said[-1]


AT_WORK = """Stack (most recent call first):
  File "/job/train.py", line 9 in loss
  File "/job/train.py", line 20 in <module>
  File "/x/tensorforge/launch/processes/bootstrap.py", line 88 in _run_script
"""
WAITING = """Stack (most recent call first):
  File "/x/tensorforge/train/group/gloo_group.py", line 70 in wait
  File "/x/tensorforge/train/loop/run.py", line 99 in commit
  File "/job/train.py", line 21 in <module>
  File "/x/tensorforge/launch/processes/bootstrap.py", line 88 in _run_script
"""


def test_without_progress_the_worker_that_is_at_work_is_the_one_that_hangs():
    driver = up(workers=2, hang_timeout=60.0)
    assert driver.wait(59.9) == []
    assert driver.wait(0.1) == [DumpStacks("worker-0"), DumpStacks("worker-1")]
    assert driver.tell(StacksDumped("worker-0", WAITING)) == []
    assert driver.tell(StacksDumped("worker-1", AT_WORK)) == [Kill("worker-1")]
    assert driver.tell(WorkerExited("worker-1", -9)) == [StartWorker("worker-2")]
    assert "worker-1 hangs: no progress for 60 s" in driver.said[-1]


def test_a_worker_that_does_not_even_dump_its_stacks_hangs():
    driver = up(workers=1, hang_timeout=60.0)
    assert driver.wait(60.0) == [DumpStacks("worker-0")]
    assert driver.wait(DUMP_TIMEOUT) == [Kill("worker-0")]


def test_when_everyone_waits_there_is_a_warning_and_then_an_end():
    driver = up(workers=1, hang_timeout=60.0)
    driver.wait(60.0)
    assert driver.tell(StacksDumped("worker-0", WAITING)) == []
    assert "every worker waits" in driver.said[-2]
    assert driver.said[-1] == "where worker-0 waits"
    driver.wait(60.0)
    assert driver.tell(StacksDumped("worker-0", WAITING)) == [StopTraining("worker-0")]
    driver.tell(WorkerExited("worker-0", 0))
    assert driver.outcome.code == 1


def test_progress_while_the_stacks_are_collected_acquits_everyone():
    driver = up(workers=1, hang_timeout=60.0)
    driver.wait(60.0)
    driver.tell(CommittedStep(step=2), StacksDumped("worker-0", AT_WORK))
    assert driver.wait(DUMP_TIMEOUT) == []


def test_a_worker_that_never_joins_hangs_too():
    driver = Driver(workers=1, join_timeout=60.0)
    driver.tell(CoordinatorStarted("a", 1), WorkerStarted("worker-0", 7))
    assert driver.supervisor.deadline() == 60.0
    assert driver.wait(60.0) == [DumpStacks("worker-0")]
    assert driver.tell(StacksDumped("worker-0", AT_WORK)) == [Kill("worker-0")]
    driver.tell(WorkerExited("worker-0", -9))
    assert "did not join within 60 s" in driver.said[-1]


@pytest.mark.parametrize("event", [WorkerExited("x", 1), WorkerReleased("x"), WorkerLost("x", "")])
def test_news_of_strangers_is_harmless(event):
    driver = up(workers=1)
    assert driver.tell(event) == []


def test_after_the_end_nothing_is_done_any_more():
    driver = up(workers=1)
    driver.tell(TrainingFinished(), WorkerExited("worker-0", 0))
    assert driver.tell(WorkerExited("worker-0", 1), TargetChanged(5), StopRequested(2)) == []
    assert driver.supervisor.handle(Tick(), 1e9) == []
