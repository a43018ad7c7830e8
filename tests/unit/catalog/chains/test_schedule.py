import math

import pytest

from tensorforge.catalog import (
    CheckpointSchedule,
    TrainingProgress,
    estimate_mtbf,
    young_daly_interval,
)
from tensorforge.errors import ConfigurationError, InvalidInputError


def wasted_share(work, cost, mtbf):
    """Time spent per second of work when failures come at random (Daly's model, restart aside)."""
    return mtbf * math.expm1((work + cost) / mtbf) / work


def test_every_so_many_steps():
    schedule = CheckpointSchedule(every_steps=10)
    assert not schedule.should_checkpoint(TrainingProgress(step=19, now=0.0, last_step=10))
    decision = schedule.should_checkpoint(TrainingProgress(step=20, now=0.0, last_step=10))
    assert decision
    assert decision.reason == "10 steps passed, every 10 asked for"


def test_a_step_count_that_jumps_over_the_mark_is_still_due():
    assert CheckpointSchedule(every_steps=10).should_checkpoint(TrainingProgress(step=37, now=0.0))


def test_every_so_many_seconds():
    schedule = CheckpointSchedule(every_seconds=60)
    early = TrainingProgress(step=5, now=159.9, last_step=1, last_time=100.0)
    late = TrainingProgress(step=5, now=160.0, last_step=1, last_time=100.0)
    assert not schedule.should_checkpoint(early)
    assert schedule.should_checkpoint(late)


def test_nothing_is_due_before_a_step_was_made():
    schedule = CheckpointSchedule(every_seconds=1)
    decision = schedule.should_checkpoint(TrainingProgress(step=5, now=1e6, last_step=5))
    assert not decision
    assert "no step" in decision.reason


def test_the_first_rule_that_holds_decides():
    schedule = CheckpointSchedule(every_steps=1000, every_seconds=60)
    assert schedule.should_checkpoint(TrainingProgress(step=2, now=61.0))
    assert schedule.should_checkpoint(TrainingProgress(step=1000, now=1.0))


@pytest.mark.parametrize(("cost", "mtbf"), [(1.0, 3600.0), (30.0, 86_400.0), (120.0, 900.0)])
def test_the_optimal_interval_wastes_the_least(cost, mtbf):
    best = young_daly_interval(cost, mtbf)
    optimum = min(wasted_share(best * (0.2 + 0.01 * k), cost, mtbf) for k in range(300))
    assert wasted_share(best, cost, mtbf) <= 1.001 * optimum


def test_the_optimal_schedule_starts_early_then_follows_what_was_measured():
    schedule = CheckpointSchedule(optimal=True, min_seconds=5, max_seconds=3600)
    assert schedule.should_checkpoint(TrainingProgress(step=1, now=5.0))
    cheap = TrainingProgress(step=1, now=0.0, save_seconds=0.5, observed_seconds=1e5)
    costly = TrainingProgress(step=1, now=0.0, save_seconds=50.0, observed_seconds=1e5)
    fragile = TrainingProgress(step=1, now=0.0, save_seconds=0.5, failures=99, observed_seconds=1e5)
    interval = schedule.optimal_seconds
    assert interval(fragile) < interval(cheap) < interval(costly)


def test_the_optimal_interval_stays_within_its_bounds():
    schedule = CheckpointSchedule(optimal=True, min_seconds=100, max_seconds=200)
    assert schedule.optimal_seconds(TrainingProgress(1, 0.0, save_seconds=1e-6)) == 100
    assert schedule.optimal_seconds(TrainingProgress(1, 0.0, save_seconds=1e5)) == 200


def test_the_reason_names_cost_and_failure_rate():
    progress = TrainingProgress(step=9, now=1e9, save_seconds=2.0, observed_seconds=0.0)
    decision = CheckpointSchedule(optimal=True).should_checkpoint(progress)
    assert decision
    assert "a save costs 2.00 s, failures come every 86400 s" in decision.reason


def test_a_save_that_takes_longer_than_the_system_lives_is_made_once_a_failure():
    assert young_daly_interval(100.0, 10.0) == 10.0


def test_the_mean_time_between_failures_starts_from_an_assumption_and_follows_the_facts():
    assert estimate_mtbf(0, 0.0, prior_seconds=100) == 100
    assert estimate_mtbf(1000, 10_000.0, prior_seconds=100) == pytest.approx(10, rel=0.02)


@pytest.mark.parametrize("bad", [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf)])
def test_impossible_measurements_are_refused(bad):
    with pytest.raises(InvalidInputError):
        young_daly_interval(*bad)


def test_an_impossible_failure_count_is_refused():
    with pytest.raises(InvalidInputError, match="failures = -1"):
        estimate_mtbf(-1, 0.0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"every_steps": 0},
        {"every_seconds": 0.0},
        {"every_seconds": math.nan},
        {"optimal": True, "min_seconds": 10.0, "max_seconds": 5.0},
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(options):
    with pytest.raises(ConfigurationError):
        CheckpointSchedule(**options)
