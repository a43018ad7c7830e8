"""Chains and retention hold for any records, consistent or not."""

import itertools
import math
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from tensorforge.catalog import (
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    GcPolicy,
    RestoreCriteria,
    chain_length,
    chain_size,
    decide_retention,
    find_chain_root,
    restoration_chain,
    selection_score,
    young_daly_interval,
)
from tensorforge.catalog.chains.chains import is_restorable, restorable_ids
from tensorforge.catalog.chains.restore import rank_candidates
from tensorforge.errors import CheckpointError

NOW = datetime(2026, 6, 1, tzinfo=UTC)
METRIC = st.one_of(st.none(), st.sampled_from([math.nan, math.inf, 0.0, 1.0, -2.5]))


@st.composite
def runs(draw, tangled=True):
    """The records of one run; with `tangled`, parents may be missing or form cycles."""
    count = draw(st.integers(1, 12))
    records = []
    for index in range(count):
        above = count + 1 if tangled else index
        parent = draw(st.one_of(st.none(), st.integers(0, above - 1))) if above else None
        state = draw(st.sampled_from(list(CheckpointState)))
        value = draw(METRIC)
        records.append(
            CheckpointRecord(
                checkpoint_id=f"c{index}",
                training_run_id="run",
                epoch=0,
                step=draw(st.integers(0, 5)) if tangled else index,
                checkpoint_type=CheckpointType.FULL
                if parent is None
                else CheckpointType.INCREMENTAL,
                state=state,
                created_at=NOW - timedelta(seconds=draw(st.integers(0, 100))),
                size_bytes=draw(st.integers(0, 9)),
                parent_id=None if parent is None else f"c{parent}",
                metrics={} if value is None else {"loss": value},
                storage_path=f"c{index}",
                verified_at=draw(st.sampled_from([None, NOW])),
            )
        )
    return records


POLICIES = st.builds(
    GcPolicy,
    max_checkpoints_per_run=st.one_of(st.none(), st.integers(1, 5)),
    max_age_seconds=st.one_of(st.none(), st.integers(0, 100)),
    keep_best_n=st.integers(0, 3),
    metric_ascending=st.booleans(),
    abandoned_after_seconds=st.integers(1, 100),
)


@given(runs(tangled=False))
def test_the_questions_about_a_chain_agree_with_each_other(records):
    by_id = {record.checkpoint_id: record for record in records}
    for record in records:
        name = record.checkpoint_id
        if record.parent_id is None:
            assert chain_length(records, name) == 1
            assert find_chain_root(records, name) == name
            assert chain_size(records, name) == record.size_bytes
        else:
            assert chain_length(records, name) == 1 + chain_length(records, record.parent_id)
            assert find_chain_root(records, name) == find_chain_root(records, record.parent_id)
            below = chain_size(records, record.parent_id)
            assert chain_size(records, name) == record.size_bytes + below
        if is_restorable(records, name):
            chain = restoration_chain(records, name)
            assert len(chain) == chain_length(records, name)
            assert (chain[0], chain[-1]) == (find_chain_root(records, name), name)
            assert all(by_id[b].parent_id == a for a, b in itertools.pairwise(chain))


@given(runs())
def test_a_tangled_chain_is_an_error_and_never_a_loop(records):
    for record in records:
        try:
            assert 1 <= chain_length(records, record.checkpoint_id) <= len(records)
        except CheckpointError as error:
            assert "broken" in str(error)


@given(runs())
def test_what_can_be_restored_is_the_same_asked_one_by_one_or_all_at_once(records):
    known = {record.checkpoint_id: record for record in records}
    assert restorable_ids(known) == {name for name in known if is_restorable(known, name)}


@given(runs(), POLICIES)
def test_retention_keeps_its_promises(records, policy):
    decisions = decide_retention(records, policy, NOW)
    live = [record for record in records if record.state is not CheckpointState.DELETED]
    kept = [decision.record for decision in decisions if decision.keep]
    kept_ids = {record.checkpoint_id for record in kept}
    restorable = [r for r in live if is_restorable(live, r.checkpoint_id)]

    assert sorted(d.checkpoint_id for d in decisions) == sorted(r.checkpoint_id for r in live)
    assert all(decision.reasons for decision in decisions)
    for record in kept:
        if record.state is CheckpointState.COMPLETE:
            assert is_restorable(kept, record.checkpoint_id)
    if restorable:
        assert max(restorable, key=lambda r: r.recency).checkpoint_id in kept_ids
    verified = [record for record in restorable if record.verified_at]
    if verified:
        assert max(verified, key=lambda r: r.recency).checkpoint_id in kept_ids
    sign = 1 if policy.metric_ascending else -1
    scored = sorted(
        sign * r.metrics["loss"]
        for r in restorable
        if not math.isnan(r.metrics.get("loss", math.nan))
    )
    kept_scores = sorted(
        sign * r.metrics["loss"]
        for r in restorable
        if r.checkpoint_id in kept_ids and not math.isnan(r.metrics.get("loss", math.nan))
    )
    best = scored[: policy.keep_best_n]
    assert kept_scores[: len(best)] == best


@given(runs(), POLICIES)
def test_collecting_twice_at_one_time_changes_nothing_more(records, policy):
    kept = [d.record for d in decide_retention(records, policy, NOW) if d.keep]
    again = decide_retention(kept, policy, NOW)
    assert [d.record for d in again if d.keep] == sorted(
        kept, key=lambda r: r.recency, reverse=True
    )


@given(runs(), st.booleans(), st.one_of(st.none(), st.integers(0, 5)))
def test_the_chosen_restore_point_has_the_highest_score_of_the_restorable(records, full, max_step):
    criteria = RestoreCriteria(training_run_id="run", prefer_full=full, max_step=max_step)
    best = next((c for c in rank_candidates(records, criteria) if not c.score.refusal), None)
    fit = [
        selection_score(r, criteria, chain_length(records, r.checkpoint_id))
        for r in records
        if is_restorable(records, r.checkpoint_id)
    ]
    assert (best.score.total if best else -math.inf) == max(fit, default=-math.inf)


@given(st.floats(1e-3, 1e4), st.floats(1.0, 1e7))
def test_the_optimal_interval_is_positive_and_grows_with_cost_and_reliability(cost, mtbf):
    interval = young_daly_interval(cost, mtbf)
    assert 0 < interval < math.inf
    if cost < mtbf / 100:
        assert young_daly_interval(cost * 2, mtbf) > interval
        assert young_daly_interval(cost, mtbf * 2) > interval
