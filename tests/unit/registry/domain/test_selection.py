import itertools
import math

import pytest
from tests.unit.registry.sample_values import metadata, result

from tensorforge.errors import InvalidInputError
from tensorforge.registry import (
    CanaryPolicy,
    CanaryVerdict,
    DeploymentState,
    Sla,
    assess_rollback,
    decide_canary,
    meets_sla,
    rollback_priority,
    select_best_model,
)

nan, inf = math.nan, math.inf


@pytest.mark.parametrize(
    ("p99", "accuracy", "passes"),
    [
        (10, 0.9, True),
        (10.0001, 0.9, False),
        (10, 0.8999, False),
        (0, 1, True),
        (nan, 0.9, False),
        (10, nan, False),
        (nan, nan, False),
        (inf, 1, False),
    ],
)
def test_an_sla_is_met_up_to_its_limits_and_never_by_nan(p99, accuracy, passes):
    assert meets_sla(result(p99=p99, accuracy=accuracy), 10, 0.9) is passes


def test_a_limit_that_is_nan_passes_nothing():
    assert not meets_sla(result(p99=0, accuracy=1), nan, 0)
    assert not meets_sla(result(p99=0, accuracy=1), 10, nan)


@pytest.mark.parametrize(("latency", "accuracy"), [(nan, 0.5), (0, 0.5), (-1, 0.5), (1, nan)])
def test_an_sla_without_meaning_is_refused(latency, accuracy):
    with pytest.raises(InvalidInputError):
        Sla(max_latency_ms=latency, min_accuracy=accuracy)


def candidate(version, state, accuracy, p99=10.0):
    return metadata(version, state=state), result(version, accuracy=accuracy, p99=p99)


S = DeploymentState


def test_the_most_accurate_wins_then_the_fastest_then_the_newest():
    pool = [
        candidate("1.0.0", S.PRODUCTION, 0.90, 5),
        candidate("1.1.0", S.CANARY, 0.95, 20),
        candidate("1.2.0", S.PRODUCTION, 0.95, 10),
        candidate("1.3.0", S.PRODUCTION, 0.95, 10),
    ]
    for order in itertools.permutations(pool):
        assert str(select_best_model(order).version) == "1.3.0"


@pytest.mark.parametrize("state", [s for s in S if s not in (S.PRODUCTION, S.CANARY)])
def test_what_does_not_serve_is_never_selected(state):
    assert select_best_model([candidate("1.0.0", state, 1.0)]) is None


def test_nothing_to_choose_from_is_none():
    assert select_best_model([]) is None


def test_a_figure_that_was_not_measured_loses_to_every_measured_one():
    pool = [
        candidate("2.0.0", S.PRODUCTION, nan, 1),
        candidate("1.0.0", S.PRODUCTION, 0.1, 900),
        candidate("1.1.0", S.PRODUCTION, 0.1, nan),
    ]
    for order in itertools.permutations(pool):
        assert str(select_best_model(order).version) == "1.0.0"


def test_a_version_that_is_no_worse_has_no_rollback_priority():
    base = result(accuracy=0.9, p99=10, errors=("one",))
    better = result(accuracy=0.95, p99=5)
    assert rollback_priority(base, base) == 0
    assert assess_rollback(better, base) == assess_rollback(base, base)


@pytest.mark.parametrize(
    ("worse", "reason"),
    [
        (result(accuracy=0.9, p99=10, errors=("x", "y")), "2 errors instead of 0"),
        (result(accuracy=0.9, p99=15), "p99 latency rose by 50% to 15 ms"),
        (result(accuracy=0.8, p99=10), "accuracy fell by 0.1 to 0.8"),
        (result(accuracy=nan, p99=10), "accuracy is nan, it was 0.9"),
        (result(accuracy=0.9, p99=nan), "p99 latency is nan ms, it was 10 ms"),
        (result(accuracy=0.9, p99=inf), "p99 latency is inf ms"),
    ],
)
def test_each_thing_that_got_worse_counts_and_is_named(worse, reason):
    found = assess_rollback(worse, result(accuracy=0.9, p99=10))
    assert found.priority > 0
    assert math.isfinite(found.priority)
    assert len(found.reasons) == 1
    assert reason in found.reasons[0]


def test_priorities_add_up_and_grow_with_the_damage():
    base = result(accuracy=0.9, p99=10)
    slow = rollback_priority(result(accuracy=0.9, p99=20), base)
    wrong = rollback_priority(result(accuracy=0.7, p99=10), base)
    both = rollback_priority(result(accuracy=0.7, p99=20), base)
    assert both == pytest.approx(slow + wrong)
    assert rollback_priority(result(accuracy=0.7, p99=40), base) > both


def test_a_gain_never_hides_a_loss():
    base = result(accuracy=0.9, p99=10)
    faster_but_wrong = result(accuracy=0.5, p99=0.1)
    assert rollback_priority(faster_but_wrong, base) == pytest.approx(4.0)


SLA = Sla(max_latency_ms=50, min_accuracy=0.8)


@pytest.mark.parametrize(
    ("canary", "verdict", "reason"),
    [
        (result(accuracy=0.92, p99=10, samples=10_000), CanaryVerdict.PASS, "within the limits"),
        (result(accuracy=0.92, p99=10, samples=None), CanaryVerdict.PASS, "within the limits"),
        (
            result(accuracy=0.70, p99=10, samples=10_000),
            CanaryVerdict.FAIL,
            "accuracy 0.7 is below",
        ),
        (result(accuracy=0.92, p99=60, samples=10_000), CanaryVerdict.FAIL, "above 11 ms"),
        (result(accuracy=0.92, p99=10, errors=("boom",)), CanaryVerdict.FAIL, "error: boom"),
        (result(accuracy=0.92, p99=10, passed=False), CanaryVerdict.FAIL, "did not pass"),
        (result(accuracy=0.92, p99=10, samples=10), CanaryVerdict.INCONCLUSIVE, "fewer than 100"),
        (result(accuracy=0.89, p99=10, samples=200), CanaryVerdict.INCONCLUSIVE, "more samples"),
        (result(accuracy=nan, p99=10), CanaryVerdict.INCONCLUSIVE, "accuracy was not measured"),
        (result(accuracy=0.92, p99=nan), CanaryVerdict.INCONCLUSIVE, "latency was not measured"),
    ],
)
def test_a_canary_passes_fails_or_stays_open_with_a_reason(canary, verdict, reason):
    decision = decide_canary(canary, result(accuracy=0.9, p99=10), SLA)
    assert decision.verdict is verdict
    assert any(reason in text for text in decision.reasons)


def test_without_baseline_and_sla_a_measured_canary_passes():
    decision = decide_canary(result(accuracy=0.1, p99=1e6), None, None)
    assert decision.verdict is CanaryVerdict.PASS


def test_the_policy_says_how_much_may_be_lost():
    base = result(accuracy=0.9, p99=10)
    canary = result(accuracy=0.85, p99=14)
    assert decide_canary(canary, base, None).verdict is CanaryVerdict.FAIL
    lenient = CanaryPolicy(max_accuracy_drop=0.1, max_latency_increase=0.5)
    assert decide_canary(canary, base, None, lenient).verdict is CanaryVerdict.PASS
