import errno
import io
import json

import pytest
from rich.console import Console

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.launch.display.displays import (
    FailsafeDisplay,
    JsonDisplay,
    LiveDisplay,
    PlainDisplay,
    choose_display,
)
from tensorforge.launch.display.render import render
from tensorforge.launch.display.run_view import RunView
from tensorforge.launch.supervisor.events import (
    CheckpointProgress,
    CoordinatorStarted,
    GenerationFormed,
    TargetChanged,
    Tick,
    WorkerExited,
    WorkerJoined,
    WorkerReleased,
    WorkerStarted,
)
from tensorforge.launch.supervisor.instructions import Level, Say

PHASES = {"detection": 1.0, "barrier": 20.0, "first commit": 15.0}
STORY = [
    TargetChanged(3),
    CoordinatorStarted("127.0.0.1:7", 1),
    WorkerStarted("worker-0", 100),
    WorkerStarted("worker-1", 101),
    WorkerStarted("worker-2", 102),
    WorkerJoined("worker-0"),
    WorkerJoined("worker-2"),
    GenerationFormed(1, ("worker-0", "worker-1"), "the first 2 workers are here"),
    CommittedStep(step=1, epoch=0, samples=48, metrics={"loss": 2.5}, learning_rate=0.001),
    CommittedStep(step=2, epoch=0, samples=48, metrics={"loss": 1.5}, learning_rate=0.001),
    WorkerExited("worker-1", -9),
    GenerationFormed(2, ("worker-0",), "worker-1 failed: its stream broke"),
    GenerationFormed(2, ("worker-0",), "worker-1 failed: its stream broke", PHASES),
    CheckpointProgress(2, complete=False),
    Tick(),
]


def tell(display, view=None):
    view = view or RunView()
    for number, event in enumerate(STORY):
        view.apply(event, float(number))
        display.event(event, view, float(number))
        display.refresh(view, float(number))
    return view


def shown(view, now=20.0, width=160):
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render(view, now, width))
    return console.export_text()


def test_the_view_shows_everything_that_was_asked_for():
    view = tell(PlainDisplay(io.StringIO()))
    text = shown(view)
    assert "training · generation 2 · 1 of 3 workers · coordinator 127.0.0.1:7" in text
    assert "step 2  epoch 0  loss 1.5" in text
    assert "learning rate 0.001" in text
    assert "loss █▁" in text
    assert "worker-1  pid 101  was killed by SIGKILL" in text
    assert "worker-2  pid 102  standing by" in text
    assert "36 ms" in text
    assert "detection 1, barrier 20, first commit 15" in text
    assert "worker-1 failed: its stream broke" in text
    assert "checkpoint of step 2" in text
    view.apply(CheckpointProgress(2, complete=True), 21.0)
    assert "checkpoint of step 2: complete" in shown(view)


def test_workers_from_elsewhere_are_shown_while_they_are_there():
    view = tell(PlainDisplay(io.StringIO()))
    view.apply(WorkerJoined("far-1"), 21.0)
    view.apply(GenerationFormed(3, ("worker-0", "far-1"), "far-1 joined"), 22.0)
    assert "generation 3 · 2 of 3 workers" in shown(view)
    assert "far-1     elsewhere  training" in shown(view)
    view.apply(WorkerReleased("far-1", "far-1 leaves: SIGTERM"), 23.0)
    view.apply(GenerationFormed(4, ("worker-0",), "far-1 leaves: SIGTERM"), 24.0)
    assert "elsewhere" not in shown(view)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_rescale_takes_one_line_in_a_narrow_terminal(width):
    view = tell(PlainDisplay(io.StringIO()))
    lines = shown(view, width=width).splitlines()
    assert sum("gen" in line for line in lines) == 3
    assert any("36 ms" in line for line in lines)


def test_an_empty_view_can_be_shown():
    assert "no step yet" in shown(RunView())


@pytest.mark.parametrize("width", [20, 40, 300])
def test_the_view_fits_its_terminal(width):
    view = tell(PlainDisplay(io.StringIO()))
    assert all(len(line) <= width for line in shown(view, width=width).splitlines())


def test_ages_are_told_in_words():
    view = RunView()
    view.apply(WorkerStarted("worker-0", 1), 0.0)
    assert "5 s" in shown(view, 5.0)
    assert "2 min 05 s" in shown(view, 125.0)
    assert "1 h 1 min" in shown(view, 3665.0)


def test_plain_lines_carry_their_source_and_no_escape_codes():
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.printed("worker-3", "\x1b[31mhello\x1b[0m")
    display.say(Say("worker-1 was killed", Level.WARNING))
    tell(display)
    display.close()
    assert stream.getvalue().splitlines() == [
        "[worker-3] hello",
        "tensorforge: warning: worker-1 was killed",
        "tensorforge: generation 1: 2 workers (the first 2 workers are here)",
        "tensorforge: step 1  epoch 0  loss 2.5  learning rate 0.001",
        "tensorforge: generation 2: 1 worker (worker-1 failed: its stream broke)",
        (
            "tensorforge: generation 2: training again after 36 ms "
            "(detection 1, barrier 20, first commit 15)"
        ),
    ]


def test_steps_are_told_every_few_seconds_only():
    stream = io.StringIO()
    display, view = PlainDisplay(stream), RunView()
    for step in range(100):
        event = CommittedStep(step=step)
        view.apply(event, step / 10)
        display.event(event, view, step / 10)
    assert len(stream.getvalue().splitlines()) == 2


def test_json_lines_tell_every_event():
    stream = io.StringIO()
    display = JsonDisplay(stream)
    display.printed("worker-0", "x")
    display.say(Say("y", Level.INFO, "worker-0", "more\nof it"))
    tell(display)
    display.event(CommittedStep(step=9, metrics={"loss": float("nan")}), RunView(), 0.0)
    display.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines[0] == {"event": "log", "worker": "worker-0", "line": "x"}
    assert lines[1].items() >= {"event": "notice", "level": "info", "worker": "worker-0"}.items()
    assert (lines[1]["text"], lines[1]["detail"]) == ("y", "more\nof it")
    assert lines[2] == {"event": "target_changed", "workers": 3}
    steps = [line for line in lines if line["event"] == "step_committed"]
    facts = {"step": 2, "epoch": 0, "samples": 96, "loss": 1.5, "learning_rate": 0.001}
    assert len(steps) == 3
    assert steps[1] == {"event": "step_committed", **facts}
    assert (steps[-1]["loss"], steps[-1]["learning_rate"]) == (None, None)
    assert "tick" not in {line["event"] for line in lines}


def test_the_live_view_scrolls_output_above_itself():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, height=30, color_system=None)
    display = LiveDisplay(console)
    display.printed("worker-0", "hello [bold]not markup[/bold] \x1b[2J")
    display.printed("stranger", "hello")
    display.say(Say("note", Level.ERROR))
    tell(display)
    display.close()
    text = file.getvalue()
    assert "[worker-0] hello [bold]not markup[/bold]" in text
    assert "\x1b[2J" not in text
    assert "generation 2 · 1 of 3 workers" in text


def test_without_a_terminal_lines_are_plain(capsys):
    assert isinstance(choose_display(as_json=False), PlainDisplay)
    assert isinstance(choose_display(as_json=True), JsonDisplay)


def test_a_worker_that_has_not_come_yet_does_not_stand_by():
    view = tell(PlainDisplay(io.StringIO()))
    view.apply(WorkerStarted("worker-9", 109), 21.0)
    view.apply(GenerationFormed(3, ("worker-0",), "because"), 22.0)
    assert "worker-9  pid 109  starting" in shown(view)


class Gone:
    """A stream whose other end went away."""

    def __init__(self, error):
        self.error = error
        self.tried = 0

    def write(self, _text):
        self.tried += 1
        raise self.error

    def flush(self):
        pass


@pytest.mark.parametrize(
    ("error", "is_pipe"), [(OSError(errno.EIO, "gone"), False), (BrokenPipeError(), True)]
)
def test_after_the_first_failure_there_is_silence(error, is_pipe):
    stream = Gone(error)
    display = FailsafeDisplay(PlainDisplay(stream))
    display.say(Say("hello"))
    display.printed("worker-0", "hello")
    display.close()
    assert stream.tried == 1
    assert display.is_pipe_broken is is_pipe
