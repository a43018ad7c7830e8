import math
from datetime import UTC, datetime, timedelta

import pytest

from tensorforge.catalog import (
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    GcPolicy,
    decide_retention,
    is_gc_eligible,
)
from tensorforge.errors import ConfigurationError

NOW = datetime(2026, 6, 1, tzinfo=UTC)


def record(step, parent=None, *, age=0.0, state=CheckpointState.COMPLETE, loss=None, **more):
    return CheckpointRecord(
        checkpoint_id=f"s{step}",
        training_run_id="run",
        epoch=0,
        step=step,
        checkpoint_type=CheckpointType.FULL if parent is None else CheckpointType.INCREMENTAL,
        state=state,
        created_at=NOW - timedelta(seconds=age),
        parent_id=None if parent is None else f"s{parent}",
        metrics={} if loss is None else {"loss": loss},
        storage_path=f"run/s{step}",
        **more,
    )


def kept(records, **policy):
    decisions = decide_retention(records, GcPolicy(**policy), NOW)
    assert all(decision.reasons for decision in decisions)
    return {decision.record.step for decision in decisions if decision.keep}


def reasons(records, step, **policy):
    decisions = decide_retention(records, GcPolicy(**policy), NOW)
    return next("; ".join(d.reasons) for d in decisions if d.record.step == step)


def test_the_newest_so_many_are_kept():
    records = [record(step) for step in range(1, 6)]
    assert kept(records, max_checkpoints_per_run=2) == {4, 5}
    assert reasons(records, 3, max_checkpoints_per_run=2) == "it is not among the newest 2"


def test_without_limits_everything_is_kept():
    assert kept([record(1, age=1e9), record(2)], max_checkpoints_per_run=None) == {1, 2}


def test_too_old_ones_go_even_if_they_are_few():
    records = [record(1, age=7200), record(2, age=60), record(3)]
    assert kept(records, max_age_seconds=3600) == {2, 3}
    assert "2.0 hours old, the limit is 1.0 hours" in reasons(records, 1, max_age_seconds=3600)


def test_the_newest_restorable_one_is_kept_however_old_it_is():
    assert kept([record(1, age=1e6), record(2, age=1e6)], max_age_seconds=1) == {2}


def test_the_newest_verified_one_is_kept_beside_a_newer_unverified_one():
    records = [record(1, verified_at=NOW), record(2, verified_at=NOW), record(3), record(4)]
    assert kept(records, max_checkpoints_per_run=1) == {2, 4}


def test_the_best_by_metric_are_kept():
    records = [record(step, loss=loss) for step, loss in enumerate([5.0, 1.0, 2.0, 9.0, 8.0])]
    assert kept(records, max_checkpoints_per_run=1, keep_best_n=2) == {1, 2, 4}
    assert "number 1 of the best 2 by loss (1)" in reasons(
        records, 1, max_checkpoints_per_run=1, keep_best_n=2
    )


def test_higher_is_better_where_the_policy_says_so():
    records = [record(step, loss=loss) for step, loss in enumerate([5.0, 9.0, 2.0])]
    policy = {"max_checkpoints_per_run": 1, "keep_best_n": 1, "metric_ascending": False}
    assert kept(records, **policy) == {1, 2}


@pytest.mark.parametrize("ascending", [True, False])
def test_nan_and_missing_metrics_are_never_the_best(ascending):
    records = [record(0, loss=math.nan), record(1, loss=3.0), record(2), record(3, loss=math.nan)]
    policy = {"max_checkpoints_per_run": 1, "keep_best_n": 2, "metric_ascending": ascending}
    assert kept(records, **policy) == {1, 3}


def test_by_a_metric_that_no_checkpoint_has_nothing_is_deleted():
    records = [record(step, loss=1.0) for step in range(5)]
    policy = {"max_checkpoints_per_run": 1, "keep_best_n": 1, "metric_key": "accuracy"}
    assert kept(records, **policy) == {0, 1, 2, 3, 4}
    assert "no checkpoint of the run has 'accuracy'" in str(reasons(records, 0, **policy))


def test_of_equally_good_ones_the_newer_is_kept():
    records = [record(step, loss=1.0) for step in range(4)]
    assert kept(records, max_checkpoints_per_run=1, keep_best_n=2) == {2, 3}


def test_what_a_kept_one_builds_on_is_kept():
    records = [record(1), record(2, 1), record(3, 2), record(4)]
    assert kept(records, max_checkpoints_per_run=2) == {1, 2, 3, 4}
    assert "s3 builds on it" in reasons(records, 1, max_checkpoints_per_run=2)


def test_what_one_that_is_being_created_builds_on_is_kept():
    creating = record(3, 1, state=CheckpointState.CREATING)
    assert kept([record(1), record(2), creating], max_checkpoints_per_run=1) == {1, 2, 3}


def test_a_corrupted_one_goes_and_a_broken_chain_with_it():
    bad = record(2, 1, state=CheckpointState.CORRUPTED, note="checksum of w differs")
    records = [record(1), bad, record(3, 2), record(4, 99)]
    assert kept(records) == {1}
    assert reasons(records, 2) == "it is corrupted: checksum of w differs"
    assert "chain is broken" in reasons(records, 3)
    assert "chain is broken" in reasons(records, 4)


def test_one_that_is_being_created_is_left_alone_until_it_counts_as_abandoned():
    fresh = record(1, state=CheckpointState.CREATING, age=10)
    stale = record(2, state=CheckpointState.CREATING, age=1000)
    assert kept([fresh, stale], abandoned_after_seconds=100) == {1}


def test_deleted_ones_are_not_judged_again():
    assert decide_retention([record(1, state=CheckpointState.DELETED)], GcPolicy(), NOW) == ()


def test_two_checkpoints_of_the_newest_step_do_not_protect_each_other():
    older = record(5, age=100)
    newer = CheckpointRecord(
        checkpoint_id="twin",
        training_run_id="run",
        epoch=0,
        step=5,
        checkpoint_type=CheckpointType.FULL,
        state=CheckpointState.COMPLETE,
        created_at=NOW,
        storage_path="run/twin",
    )
    decisions = decide_retention([older, newer], GcPolicy(max_checkpoints_per_run=1), NOW)
    assert {d.checkpoint_id for d in decisions if d.keep} == {"twin"}


class TestOneCheckpointIsEligible:
    policy = GcPolicy(max_checkpoints_per_run=3, max_age_seconds=100)

    def eligible(self, checkpoint, latest=10, is_best=False, newer=0):
        return is_gc_eligible(checkpoint, self.policy, latest, NOW, is_best, newer)

    def test_when_it_is_too_old(self):
        assert self.eligible(record(1, age=101))
        assert not self.eligible(record(1, age=100))

    def test_when_enough_newer_ones_exist(self):
        assert self.eligible(record(1), newer=3)
        assert not self.eligible(record(1), newer=2)

    def test_but_not_when_it_is_the_latest(self):
        assert not self.eligible(record(10, age=1e6))

    def test_but_not_when_it_is_among_the_best(self):
        assert not self.eligible(record(1, age=1e6), is_best=True)

    def test_always_when_it_is_corrupted(self):
        assert self.eligible(record(10, state=CheckpointState.CORRUPTED))

    def test_never_while_it_is_being_created_or_once_it_is_deleted(self):
        assert not self.eligible(record(1, age=1e4, state=CheckpointState.CREATING))
        assert not self.eligible(record(1, age=1e6, state=CheckpointState.DELETED))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_checkpoints_per_run", 0),
        ("max_checkpoints_per_run", 2.5),
        ("max_age_seconds", -1),
        ("max_age_seconds", math.nan),
        ("keep_best_n", -1),
        ("abandoned_after_seconds", 0),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(field, value):
    with pytest.raises(ConfigurationError, match=field):
        GcPolicy(**{field: value})


def test_keeping_the_best_needs_a_metric():
    with pytest.raises(ConfigurationError, match="metric_key"):
        GcPolicy(keep_best_n=1, metric_key="")
