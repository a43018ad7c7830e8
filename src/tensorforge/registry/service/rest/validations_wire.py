"""Requests about validations and canaries, and their answers."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from tensorforge.registry.domain.deployment_lifecycle import DeploymentState
from tensorforge.registry.domain.models import ValidationRecord, ValidationResult
from tensorforge.registry.domain.selection import CanaryDecision
from tensorforge.registry.domain.versions import require_version
from tensorforge.registry.service.shared_wire import Answer, Text, Whole, WireRequest

Latency = Annotated[float, Meta(ge=0)]


class RecordValidation(WireRequest):
    """What a validation measured."""

    passed: bool
    latency_p50_ms: Latency
    latency_p99_ms: Latency
    accuracy_score: float
    errors: Annotated[list[Text], Meta(max_length=100)] = msgspec.field(default_factory=list)
    samples: Whole | None = None

    def result(self, model_id: str, version: str) -> ValidationResult:
        """The validation result in this request."""
        return ValidationResult(
            model_id=model_id,
            version=require_version(version),
            passed=self.passed,
            latency_p50_ms=self.latency_p50_ms,
            latency_p99_ms=self.latency_p99_ms,
            accuracy_score=self.accuracy_score,
            errors=tuple(self.errors),
            samples=self.samples,
        )


class ValidationAnswer(Answer):
    """A validation. A figure that was not measured, or is not finite, is null."""

    record_id: int
    passed: bool
    latency_p50_ms: float | None
    latency_p99_ms: float | None
    accuracy_score: float | None
    errors: tuple[str, ...]
    samples: int | None
    state: DeploymentState
    revision: int
    recorded_at: datetime
    recorded_by: str


class ValidationList(Answer):
    """Validations of a version, the newest first."""

    items: list[ValidationAnswer]


class CanaryAnswer(Answer):
    """The verdict on a canary, and its reasons."""

    verdict: str
    reasons: tuple[str, ...]


def validation_answer(record: ValidationRecord) -> ValidationAnswer:
    """The answer that describes a validation."""
    result = record.result
    return ValidationAnswer.of(
        record,
        passed=result.passed,
        latency_p50_ms=_finite(result.latency_p50_ms),
        latency_p99_ms=_finite(result.latency_p99_ms),
        accuracy_score=_finite(result.accuracy_score),
        errors=result.errors,
        samples=result.samples,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def canary_answer(decision: CanaryDecision) -> CanaryAnswer:
    """The answer that describes the verdict on a canary."""
    return CanaryAnswer.of(decision, verdict=decision.verdict.value)
