"""What the workers' own logs tell of the training."""

from __future__ import annotations

from tensorforge.launch.run_log_reader import Progress
from tensorforge.launch.supervisor.events import StepCommitted, TrainingResumed


def formed(generation, step):
    return {"kind": "formed", "generation": generation, "committed_step": step}


def commit(generation, step):
    return {"kind": "commit", "generation": generation, "step": step, "samples": 4}


def steps(events):
    return [event.step for event in events if isinstance(event, StepCommitted)]


def test_a_step_counts_once_whoever_tells_of_it():
    progress = Progress()
    lines = [formed(1, -1), commit(1, 0), commit(1, 1), formed(1, -1), commit(1, 0), commit(1, 1)]
    events = list(progress.events(lines))
    assert steps(events) == [0, 1]
    assert events[-1].samples == 8
    assert not any(isinstance(event, TrainingResumed) for event in events)


def test_a_rescale_is_no_resumption_in_whatever_order_the_files_are_read():
    progress = Progress()
    first = [formed(1, -1), commit(1, 0), formed(2, 0), commit(2, 1)]
    second = [formed(1, -1), commit(1, 0), formed(2, 0), commit(2, 1), commit(2, 2)]
    events = list(progress.events([*first, *second]))
    assert steps(events) == [0, 1, 2]
    assert not any(isinstance(event, TrainingResumed) for event in events)


def test_a_launch_that_goes_on_from_a_checkpoint_says_so():
    assert list(Progress().events([formed(4, 59)])) == [TrainingResumed(59)]


def test_after_the_loss_of_all_workers_the_steps_are_told_again():
    progress = Progress()
    list(progress.events([formed(1, -1), *(commit(1, step) for step in range(9))]))
    lost = commit(1, 9)
    events = list(progress.events([formed(3, -1), lost, commit(3, 0), commit(3, 1)]))
    assert events[0] == TrainingResumed(-1, before=8)
    assert steps(events) == [0, 1]
