"""The whole protocol, coordinator and workers, under random schedules; and three bugs that these must find."""

import logging

import pytest

from tensorforge.elastic.coordinator.machine.cluster_state import ClusterState
from tensorforge.testing.protocol_simulation import (
    SimulatedWorker,
    Simulation,
    Violation,
    check_seed,
    run_schedule,
    schedule_of,
    shortened,
)

BLOCKS = 10
SCHEDULES = 1_000 // BLOCKS
SOAK_SCHEDULES = 100_000 // BLOCKS
FIRST_SOAK_SEED = 1_000_000
MOST_SEEDS = 2_000
"""A planted bug must be found within so many schedules."""


@pytest.fixture(autouse=True)
def quiet():
    """Refused workers are the daily bread here, and each one writes a warning."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_the_invariants_hold_under_random_schedules(block):
    for seed in range(block * SCHEDULES, (block + 1) * SCHEDULES):
        check_seed(seed)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_the_invariants_hold_under_many_random_schedules(block):
    first = FIRST_SOAK_SEED + block * SOAK_SCHEDULES
    for seed in range(first, first + SOAK_SCHEDULES):
        check_seed(seed)


def first_violation():
    for seed in range(MOST_SEEDS):
        try:
            run_schedule(schedule_of(seed))
        except Violation as violation:
            return seed, str(violation)
    raise AssertionError("no schedule finds the bug")


def test_a_coordinator_that_accepts_messages_of_old_generations_is_found(monkeypatch):
    monkeypatch.setattr(ClusterState, "ignores", lambda _self, _who, _generation: False)
    _seed, text = first_violation()
    assert text


def test_a_coordinator_that_announces_before_it_journals_is_found(monkeypatch):
    monkeypatch.setattr(Simulation, "journals_first", False)
    _seed, text = first_violation()
    assert "not in the journal" in text


def test_a_rolled_forward_member_that_skips_after_update_is_found(monkeypatch):
    monkeypatch.setattr(SimulatedWorker, "after_update_of_rolled_step", lambda _self: None)
    seed, text = first_violation()
    assert "after_update was called" in text
    short = shortened(schedule_of(seed))
    assert len(short) < len(schedule_of(seed))
    with pytest.raises(Violation):
        run_schedule(short)


def test_a_violation_says_how_to_see_it_again(monkeypatch):
    monkeypatch.setattr(SimulatedWorker, "after_update_of_rolled_step", lambda _self: None)
    seed, _text = first_violation()
    with pytest.raises(Violation) as caught:
        check_seed(seed)
    assert f"python -m tensorforge.testing.protocol_simulation {seed}" in str(caught.value)
    assert "shortened schedule has" in str(caught.value)
