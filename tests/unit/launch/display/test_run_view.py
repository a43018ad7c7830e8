import pytest

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.launch.display.run_view import GONE_KEPT, RunView
from tensorforge.launch.supervisor.events import (
    CheckpointProgress,
    CoordinatorExited,
    CoordinatorStarted,
    GenerationFormed,
    StopRequested,
    TargetChanged,
    Tick,
    TrainingFinished,
    WorkerExited,
    WorkerJoined,
    WorkerLost,
    WorkerStarted,
)
from tensorforge.launch.supervisor.exit_codes import UserFailure


def view_after(*events, every: float = 1.0) -> RunView:
    view = RunView()
    for number, event in enumerate(events):
        view.apply(event, number * every)
    return view


def test_a_worker_is_followed_from_start_to_end():
    view = RunView()
    seen = []
    for event in (
        WorkerStarted("a", 7),
        WorkerJoined("a"),
        GenerationFormed(1, ("a",)),
        WorkerLost("a", "silence"),
        WorkerExited("a", -9),
    ):
        view.apply(event, 0.0)
        seen.append(view.workers["a"].state)
    assert seen[:4] == ["starting", "joined", "training", "lost"]
    assert seen[4].startswith("was killed by SIGKILL")


def test_a_worker_outside_the_generation_stands_by():
    started = WorkerStarted("a", 1), WorkerStarted("b", 2), WorkerJoined("b")
    view = view_after(*started, GenerationFormed(1, ("a",)))
    assert view.workers["b"].state == "standing by"


def test_an_exception_is_named():
    failure = UserFailure(kind="ValueError", message="x", where="t.py:1", traceback="")
    view = view_after(WorkerStarted("a", 1), WorkerExited("a", 1, failure))
    assert view.workers["a"].state == "raised ValueError"


def test_only_the_last_dead_workers_are_kept():
    view = RunView()
    for number in range(20):
        view.apply(WorkerStarted(f"w{number}", number), 0.0)
        view.apply(WorkerExited(f"w{number}", 1), 0.0)
    assert list(view.workers) == [f"w{number}" for number in range(20 - GONE_KEPT, 20)]


def test_the_rate_is_that_of_the_last_seconds():
    view = RunView()
    for second in range(30):
        view.apply(CommittedStep(step=second, samples=100), float(second))
    assert view.samples_per_second(29.0) == pytest.approx(100.0)
    assert view.samples_per_second(100.0) is None


def test_a_step_that_comes_again_is_counted_once():
    view = view_after(
        CommittedStep(step=1, metrics={"loss": 2.0}),
        CommittedStep(step=1, metrics={"loss": 9.0}),
        CommittedStep(step=0, metrics={"loss": 9.0}),
    )
    assert view.step == 1
    assert list(view.losses) == [2.0]


def test_a_rescale_grows_in_detail_and_older_news_is_passed_over():
    view = view_after(
        GenerationFormed(2, ("a",), "b failed"),
        GenerationFormed(2, ("a",), "b failed", {"barrier": 20.0, "form": 5.5}),
        GenerationFormed(1, ("a", "b")),
    )
    assert view.generation == 2
    (rescale,) = view.rescales
    assert rescale.total == 25.5
    assert rescale.size == 1


def test_the_rest_of_the_news_is_kept():
    view = view_after(
        TargetChanged(4),
        CoordinatorStarted("127.0.0.1:1", 3),
        CheckpointProgress(5, complete=False),
        Tick(),
        StopRequested(2),
    )
    assert (view.target, view.coordinator, view.phase) == (4, "127.0.0.1:1", "stopping")
    assert view.checkpoint == CheckpointProgress(5, complete=False)
    view.apply(CoordinatorExited(-9), 9.0)
    assert "SIGKILL" in view.coordinator
    view.apply(TrainingFinished(), 9.0)
    assert view.phase == "stopped"


def test_a_run_that_is_not_being_stopped_finishes():
    view = view_after(TrainingFinished())
    assert view.phase == "finished"
