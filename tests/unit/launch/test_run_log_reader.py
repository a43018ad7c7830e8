"""What the workers' own logs tell of the training."""

from __future__ import annotations

import json

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.launch.run_log_reader import RunLogEvents, RunLogTail
from tensorforge.launch.supervisor.events import (
    CheckpointProgress,
    TrainingResumed,
    WorkerConcluded,
)


def formed(generation, step):
    return {"kind": "formed", "generation": generation, "committed_step": step}


def commit(generation, step):
    return {"kind": "commit", "generation": generation, "step": step, "samples": 4}


def steps(events):
    return [event.step for event in events if isinstance(event, CommittedStep)]


def test_a_step_counts_once_whoever_tells_of_it():
    reader = RunLogEvents()
    lines = [formed(1, -1), commit(1, 0), commit(1, 1), formed(1, -1), commit(1, 0), commit(1, 1)]
    events = list(reader.events(lines))
    assert steps(events) == [0, 1]
    assert [event.samples for event in events] == [4, 4]
    assert not any(isinstance(event, TrainingResumed) for event in events)


def test_a_rescale_is_no_resumption_in_whatever_order_the_files_are_read():
    reader = RunLogEvents()
    first = [formed(1, -1), commit(1, 0), formed(2, 0), commit(2, 1)]
    second = [formed(1, -1), commit(1, 0), formed(2, 0), commit(2, 1), commit(2, 2)]
    events = list(reader.events([*first, *second]))
    assert steps(events) == [0, 1, 2]
    assert not any(isinstance(event, TrainingResumed) for event in events)


def test_a_launch_that_goes_on_from_a_checkpoint_says_so():
    assert list(RunLogEvents().events([formed(4, 59)])) == [TrainingResumed(59)]


def test_after_the_loss_of_all_workers_the_steps_are_told_again():
    reader = RunLogEvents()
    list(reader.events([formed(1, -1), *(commit(1, step) for step in range(9))]))
    lost = commit(1, 9)
    events = list(reader.events([formed(3, -1), lost, commit(3, 0), commit(3, 1)]))
    assert events[0] == TrainingResumed(-1, before=8)
    assert steps(events) == [0, 1]


def line(**facts) -> str:
    return json.dumps(facts) + "\n"


def test_logs_are_followed_across_half_lines_and_junk(tmp_path):
    tail = RunLogTail(tmp_path / "workers")
    assert tail.read() == []
    (tmp_path / "workers").mkdir()
    path = tmp_path / "workers" / "a.jsonl"
    path.write_text(line(kind="commit", step=0) + '{"kind": "com')
    assert [found["step"] for found in tail.read()] == [0]
    with path.open("a") as file:
        file.write('mit", "step": 1}\nnot json\n[1]\n{"kind": 3}\n' + line(kind="commit", step=2))
    assert [found["step"] for found in tail.read()] == [1, 2]
    tail.close()


def test_a_step_that_several_workers_tell_counts_once():
    reader = RunLogEvents()
    commit = {"kind": "commit", "samples": 8, "epoch": 1, "learning_rate": 0.1}
    lines = [
        {**commit, "step": 0, "metrics": {"loss": 2.0}},
        {**commit, "step": 0, "metrics": {"loss": 2.0}},
        {**commit, "step": 1},
        {"kind": "commit", "step": "x"},
        {"kind": "checkpoint", "step": 1, "complete": True},
        {"kind": "checkpoint"},
        {"kind": "final", "worker": "a", "outcome": "complete"},
        {"kind": "other"},
    ]
    assert list(reader.events(lines)) == [
        CommittedStep(step=0, epoch=1, samples=8, metrics={"loss": 2.0}, learning_rate=0.1),
        CommittedStep(step=1, epoch=1, samples=8, learning_rate=0.1),
        CheckpointProgress(1, complete=True),
        WorkerConcluded("a", "complete"),
    ]
