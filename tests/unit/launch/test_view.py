import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.launch.display.run_view import GONE_KEPT, RunView
from tensorforge.launch.display.sparkline import sparkline
from tensorforge.launch.supervisor.events import (
    CheckpointProgress,
    CoordinatorExited,
    CoordinatorStarted,
    GenerationFormed,
    StepCommitted,
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
        view.apply(StepCommitted(second, samples=100 * second), float(second))
    assert view.samples_per_second(29.0) == pytest.approx(100.0)
    assert view.samples_per_second(100.0) is None


def test_a_step_that_comes_again_is_counted_once():
    view = view_after(
        StepCommitted(1, loss=2.0), StepCommitted(1, loss=9.0), StepCommitted(0, loss=9.0)
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
        CheckpointProgress(5, complete=False, share=0.5),
        Tick(),
        StopRequested(2),
    )
    assert (view.target, view.coordinator, view.phase) == (4, "127.0.0.1:1", "stopping")
    assert view.checkpoint is not None
    assert view.checkpoint.share == 0.5
    view.apply(CoordinatorExited(-9), 9.0)
    assert "SIGKILL" in view.coordinator
    view.apply(TrainingFinished(), 9.0)
    assert view.phase == "stopped"


def test_a_curve_shows_its_shape():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5, 5], 8) == "▁▁▁"
    assert sparkline([0, 0, 10, 10], 2) == "▁█"
    assert sparkline([], 8) == ""
    assert sparkline([1.0], 0) == ""


def test_what_is_no_number_does_not_stretch_the_scale():
    assert sparkline([0.0, math.nan, 1.0, math.inf], 4) == "▁!█!"
    assert sparkline([math.nan], 4) == "!"


@given(st.lists(st.floats(), max_size=60), st.integers(-1, 30))
def test_a_curve_fits_its_width_whatever_the_values(values, width):
    assert len(sparkline(values, width)) == max(0, min(width, len(values)))


def test_a_run_that_is_not_being_stopped_finishes():
    view = view_after(TrainingFinished())
    assert view.phase == "finished"
