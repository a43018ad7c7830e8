"""Whether a validation is sufficient evidence for a transition."""

from __future__ import annotations

import math
from typing import Any

from tensorforge.registry.domain.deployment_lifecycle import DeploymentState
from tensorforge.registry.domain.models import Sla, ValidationRecord
from tensorforge.registry.domain.selection import meets_sla


def evidence_problem(
    record: ValidationRecord | None, state: DeploymentState, revision: int, sla: Sla | None
) -> str | None:
    """Why the newest validation does not allow a transition from `state` towards production; `None` if it does.

    The validation must have passed, have measured latency and accuracy, and meet the SLA. It must have been
    recorded at this `revision`, that is, since the version entered `state` the last time.
    """
    if record is None or record.revision != revision:
        return f"no validation was recorded since the version entered {state.value}"
    result = record.result
    if not result.passed:
        return f"the newest validation did not pass: {_first(result.errors)}"
    if math.isnan(result.latency_p99_ms) or math.isnan(result.accuracy_score):
        return "the newest validation did not measure both latency and accuracy"
    if sla is not None and not meets_sla(result, sla.max_latency_ms, sla.min_accuracy):
        return (
            f"the newest validation misses the SLA: p99 {result.latency_p99_ms:g} ms "
            f"(at most {sla.max_latency_ms:g}), accuracy {result.accuracy_score:.4g} "
            f"(at least {sla.min_accuracy:g})"
        )
    return None


def describe_evidence(record: ValidationRecord | None, sla: Sla | None) -> dict[str, Any]:
    """What the audit stores about the validation behind a transition."""
    found: dict[str, Any] = {}
    if record is not None:
        found["validation"] = record.record_id
        found["passed"] = record.result.passed
        found["latency_p99_ms"] = _figure(record.result.latency_p99_ms)
        found["accuracy"] = _figure(record.result.accuracy_score)
    if sla is not None:
        found["sla"] = {"max_latency_ms": sla.max_latency_ms, "min_accuracy": sla.min_accuracy}
    return found


def _first(errors: tuple[str, ...]) -> str:
    return errors[0] if errors else "it names no error"


def _figure(value: float) -> float | None:
    return value if math.isfinite(value) else None
