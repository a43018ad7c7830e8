import json
import math

import pytest

from tensorforge.cluster.committed_step import CommittedStep


def reread(step: CommittedStep) -> CommittedStep | None:
    return CommittedStep.from_json(json.loads(json.dumps(step.to_json())))


def test_a_step_comes_back_from_its_line_as_it_was_written():
    step = CommittedStep(
        step=7, epoch=1, generation=3, samples=48, learning_rate=0.1, metrics={"loss": 2.0, "n": 3}
    )
    assert reread(step) == step
    assert step.loss == 2.0
    assert CommittedStep(step=7).loss is None


def test_steps_whose_metrics_are_not_finite_compare_equal_if_they_are_the_same():
    for loss in (math.nan, math.inf):
        step = CommittedStep(step=0, metrics={"loss": loss})
        assert reread(step) == reread(step)
    up, down = (CommittedStep(step=0, metrics={"loss": v}) for v in (math.inf, -math.inf))
    assert reread(up) != reread(down)


@pytest.mark.parametrize("step", [None, "3", True, 1.5])
def test_a_line_without_a_step_is_no_committed_step(step):
    assert CommittedStep.from_json({"step": step}) is None


def test_what_is_not_a_number_is_unknown():
    line = {"step": 1, "epoch": "x", "samples": None, "learning_rate": True, "metrics": {"a": "b"}}
    assert CommittedStep.from_json(line) == CommittedStep(step=1)
    assert CommittedStep.from_json({"step": 1, "metrics": [1]}) == CommittedStep(step=1)
