"""Decisions by measured figures: SLA, best version, urgency of a rollback, verdict on a canary."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from tensorforge.registry.domain.deployment_lifecycle import SERVING_STATES
from tensorforge.registry.domain.models import ModelMetadata, Sla, ValidationResult

ERROR_WEIGHT = 1.0
LATENCY_WEIGHT = 1.0
ACCURACY_WEIGHT = 10.0
UNMEASURED = 10.0
"""The weight of a figure that the baseline has and the current version does not."""

_CONFIDENCE = 1.96  # two-sided 95 %


def meets_sla(result: ValidationResult, max_latency_ms: float, min_accuracy: float) -> bool:
    """Whether p99 latency and accuracy are within the limits. NaN, as a figure or a limit, never is."""
    return result.latency_p99_ms <= max_latency_ms and result.accuracy_score >= min_accuracy


def select_best_model(
    candidates: Iterable[tuple[ModelMetadata, ValidationResult]],
) -> ModelMetadata | None:
    """The best version in production or canary: highest accuracy, then lowest p99, then highest version.

    A figure that was not measured is worse than any measured one. The result does not depend on the order of
    the candidates. `None` if no candidate is in production or canary.
    """
    serving = [pair for pair in candidates if pair[0].state in SERVING_STATES]
    if not serving:
        return None
    return max(serving, key=lambda pair: _merit(*pair))[0]


def _merit(metadata: ModelMetadata, result: ValidationResult) -> tuple[float, float, object]:
    accuracy = result.accuracy_score
    latency = result.latency_p99_ms
    return (
        -math.inf if math.isnan(accuracy) else accuracy,
        -math.inf if math.isnan(latency) else -latency,
        (metadata.version, metadata.model_id),
    )


@dataclass(frozen=True, slots=True)
class RollbackAssessment:
    """How urgent a rollback is (0: not at all), and why."""

    priority: float
    reasons: tuple[str, ...]


def assess_rollback(current: ValidationResult, baseline: ValidationResult) -> RollbackAssessment:
    """Assess a rollback from `current` to `baseline` by errors, p99 latency and accuracy.

    The priority is the sum of: 1 for each error more than the baseline has, the relative increase of the p99
    latency, and ten times the drop of the accuracy. A figure that improved counts 0, so it does not offset one
    that got worse. A figure that the baseline has and the current version does not counts 10; the priority is
    never NaN.
    """
    parts = [
        _more_errors(len(current.errors), len(baseline.errors)),
        _slower(current.latency_p99_ms, baseline.latency_p99_ms),
        _less_accurate(current.accuracy_score, baseline.accuracy_score),
    ]
    found = [part for part in parts if part is not None]
    return RollbackAssessment(
        sum(weight for weight, _ in found), tuple(reason for _, reason in found)
    )


def rollback_priority(current: ValidationResult, baseline: ValidationResult) -> float:
    """The priority of a rollback from `current` to `baseline`, as `assess_rollback` computes it."""
    return assess_rollback(current, baseline).priority


def _more_errors(now: int, before: int) -> tuple[float, str] | None:
    if now <= before:
        return None
    return (now - before) * ERROR_WEIGHT, f"{now} errors instead of {before}"


def _slower(now: float, before: float) -> tuple[float, str] | None:
    if math.isnan(before) or now <= before:
        return None
    if math.isnan(now) or math.isinf(now) or before <= 0:
        return UNMEASURED, f"p99 latency is {now:g} ms, it was {before:g} ms"
    share = (now - before) / before
    return share * LATENCY_WEIGHT, f"p99 latency rose by {share:.0%} to {now:g} ms"


def _less_accurate(now: float, before: float) -> tuple[float, str] | None:
    if math.isnan(before) or now >= before:
        return None
    if math.isnan(now) or math.isinf(before - now):
        return UNMEASURED, f"accuracy is {now:g}, it was {before:g}"
    drop = before - now
    return drop * ACCURACY_WEIGHT, f"accuracy fell by {drop:.4g} to {now:.4g}"


class CanaryVerdict(Enum):
    """The verdict on a canary."""

    PASS = "pass"  # noqa: S105  a verdict, not a password
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class CanaryDecision:
    """The verdict on a canary and the reasons for it."""

    verdict: CanaryVerdict
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryPolicy:
    """How much worse than the version that serves a canary may be, and how many samples it needs."""

    max_accuracy_drop: float = 0.01
    max_latency_increase: float = 0.10
    min_samples: int = 100


def decide_canary(
    canary: ValidationResult,
    baseline: ValidationResult | None,
    sla: Sla | None,
    policy: CanaryPolicy | None = None,
) -> CanaryDecision:
    """The verdict on a canary, by the SLA and by the newest validation of the version that serves.

    The canary fails if it had errors, if its p99 latency is above the limit, or if the whole 95 % confidence
    interval of its accuracy is below the limit. Otherwise the verdict is inconclusive if a figure was not
    measured, if there were too few samples, or if the limit is within the interval. Otherwise the canary
    passes.
    """
    policy = policy or CanaryPolicy()
    floor = _accuracy_floor(baseline, sla, policy)
    ceiling = _latency_ceiling(baseline, sla, policy)
    failures = _failures(canary, floor, ceiling)
    if failures:
        return CanaryDecision(CanaryVerdict.FAIL, tuple(failures))
    doubts = _doubts(canary, floor, policy)
    if doubts:
        return CanaryDecision(CanaryVerdict.INCONCLUSIVE, tuple(doubts))
    reason = f"accuracy {canary.accuracy_score:.4g} and p99 {canary.latency_p99_ms:g} ms are within the limits"
    return CanaryDecision(CanaryVerdict.PASS, (reason,))


def _accuracy_floor(
    baseline: ValidationResult | None, sla: Sla | None, policy: CanaryPolicy
) -> float:
    floors = [-math.inf]
    if sla is not None:
        floors.append(sla.min_accuracy)
    if baseline is not None and not math.isnan(baseline.accuracy_score):
        floors.append(baseline.accuracy_score - policy.max_accuracy_drop)
    return max(floors)


def _latency_ceiling(
    baseline: ValidationResult | None, sla: Sla | None, policy: CanaryPolicy
) -> float:
    ceilings = [math.inf]
    if sla is not None:
        ceilings.append(sla.max_latency_ms)
    if baseline is not None and not math.isnan(baseline.latency_p99_ms):
        ceilings.append(baseline.latency_p99_ms * (1 + policy.max_latency_increase))
    return min(ceilings)


def _failures(canary: ValidationResult, floor: float, ceiling: float) -> list[str]:
    failures = [f"error: {error}" for error in canary.errors]
    if not canary.passed and not failures:
        failures.append("the validation itself did not pass")
    if canary.latency_p99_ms > ceiling:
        failures.append(f"p99 latency {canary.latency_p99_ms:g} ms is above {ceiling:g} ms")
    _, highest = accuracy_interval(canary.accuracy_score, canary.samples)
    if highest < floor:
        failures.append(f"accuracy {canary.accuracy_score:.4g} is below {floor:.4g}")
    return failures


def _doubts(canary: ValidationResult, floor: float, policy: CanaryPolicy) -> list[str]:
    doubts = []
    if math.isnan(canary.latency_p99_ms):
        doubts.append("the p99 latency was not measured")
    if math.isnan(canary.accuracy_score):
        doubts.append("the accuracy was not measured")
    if canary.samples is not None and canary.samples < policy.min_samples:
        doubts.append(f"{canary.samples} samples are fewer than {policy.min_samples}")
    lowest, highest = accuracy_interval(canary.accuracy_score, canary.samples)
    if lowest < floor <= highest:
        doubts.append(
            f"accuracy is between {lowest:.4g} and {highest:.4g}, and the limit is {floor:.4g}; "
            "more samples are needed"
        )
    return doubts


def accuracy_interval(accuracy: float, samples: int | None) -> tuple[float, float]:
    """The 95 % Wilson interval of an accuracy that was measured on this number of samples.

    Without a number of samples, or for a score outside 0 to 1, the interval is the score itself.
    """
    if not samples or not 0 <= accuracy <= 1:
        return accuracy, accuracy
    z2 = _CONFIDENCE**2
    centre = (accuracy + z2 / (2 * samples)) / (1 + z2 / samples)
    spread = accuracy * (1 - accuracy) / samples + z2 / (4 * samples**2)
    half = _CONFIDENCE * math.sqrt(spread) / (1 + z2 / samples)
    return centre - half, centre + half
