import math
from datetime import UTC, datetime

import pytest

from tensorforge.catalog import (
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    RestoreCriteria,
    estimate_restore_time,
    selection_score,
)
from tensorforge.catalog.chains.restore import RestoreMeasurement, rank_candidates, rates_from
from tensorforge.errors import InvalidInputError

AT = datetime(2026, 1, 1, tzinfo=UTC)
ANY = RestoreCriteria(training_run_id="run")


def record(step, parent=None, *, state=CheckpointState.COMPLETE, size=0, **more):
    fields = {
        "checkpoint_id": f"s{step}",
        "training_run_id": "run",
        "epoch": step // 10,
        "step": step,
        "checkpoint_type": CheckpointType.FULL if parent is None else CheckpointType.INCREMENTAL,
        "state": state,
        "created_at": AT,
        "size_bytes": size,
        "parent_id": None if parent is None else f"s{parent}",
        "storage_path": f"run/s{step}",
    }
    return CheckpointRecord(**fields | more)


def test_a_later_step_scores_higher():
    assert selection_score(record(2), ANY) > selection_score(record(1), ANY)


def test_completeness_outweighs_any_number_of_steps():
    criteria = RestoreCriteria(training_run_id="run", require_complete=False)
    creating = record(2**39, state=CheckpointState.CREATING)
    assert selection_score(record(0), criteria) > selection_score(creating, criteria)


def test_preferring_full_outweighs_any_number_of_steps():
    criteria = RestoreCriteria(training_run_id="run", prefer_full=True)
    assert selection_score(record(0), criteria) > selection_score(record(2**40, 0), criteria)
    assert selection_score(record(9, 0), ANY) > selection_score(record(0), ANY)


def test_at_one_step_the_shorter_chain_scores_higher():
    scores = [selection_score(record(10**9, 0), ANY, links) for links in range(1, 16)]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == len(scores)


@pytest.mark.parametrize(
    ("checkpoint", "criteria"),
    [
        (record(1, training_run_id="other"), ANY),
        (record(1, state=CheckpointState.CORRUPTED), ANY),
        (record(1, state=CheckpointState.DELETED), ANY),
        (record(1, state=CheckpointState.CREATING), ANY),
        (record(11), RestoreCriteria(training_run_id="run", max_step=10)),
        (record(11), RestoreCriteria(training_run_id="run", max_epoch=0)),
    ],
)
def test_what_does_not_qualify_scores_minus_infinity(checkpoint, criteria):
    assert selection_score(checkpoint, criteria) == -math.inf


def test_a_broken_chain_does_not_qualify_and_the_plan_says_why():
    ranked = rank_candidates([record(1), record(5, 4), record(6, 7)], ANY)
    assert [candidate.record.step for candidate in ranked] == [1, 6, 5]
    assert ranked[1].score.refusal == "its chain is broken"


def test_the_plan_carries_the_chain_that_will_be_read():
    ranked = rank_candidates([record(1, size=100), record(2, 1, size=7)], ANY)
    assert [each.step for each in ranked[0].chain] == [1, 2]
    assert ranked[0].bytes_to_read == 107


def test_restore_time_adds_a_base_the_links_and_the_transfer():
    chain = [record(1, size=1000), record(2, 1, size=500)]
    assert estimate_restore_time(chain, 10, 5, 100.0) == 10 + 2 * 5 + 15
    assert estimate_restore_time([], 10, 5, 100.0) == 10


def test_restore_time_is_rounded_up():
    assert estimate_restore_time([record(1, size=1)], 0, 0, 1000.0) == 1


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_that_never_arrives_is_refused(rate):
    with pytest.raises(InvalidInputError, match="bytes_per_ms"):
        estimate_restore_time([], 0, 0, rate)


@pytest.mark.parametrize("base", [-1.0, math.nan, math.inf])
def test_an_impossible_base_is_refused(base):
    with pytest.raises(InvalidInputError, match="base_ms"):
        estimate_restore_time([], base, 0, 1.0)


def test_rates_come_from_the_restores_that_happened():
    rates = rates_from([RestoreMeasurement(1, 10_000, 0.1), RestoreMeasurement(5, 12_000, 0.16)])
    assert rates.bytes_per_ms == pytest.approx(100)
    assert rates.per_checkpoint_ms == pytest.approx(10)
    assert rates.measurements == 2


def test_without_restores_there_are_no_rates():
    assert rates_from([]) is None
    assert rates_from([RestoreMeasurement(1, 0, 0.5), RestoreMeasurement(1, 5, 0.0)]) is None


def test_a_longer_chain_that_was_no_slower_costs_nothing_extra():
    rates = rates_from([RestoreMeasurement(1, 1000, 0.1), RestoreMeasurement(3, 1000, 0.05)])
    assert rates.per_checkpoint_ms == 0
