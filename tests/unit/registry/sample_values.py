"""Values that the registry's tests are made of."""

from __future__ import annotations

from datetime import UTC, datetime

from tensorforge.registry import (
    Actor,
    DeploymentState,
    ModelMetadata,
    ModelRegistry,
    ModelVersion,
    ValidationResult,
    parse_version,
)

S = DeploymentState
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
BOSS = Actor(name="boss", scopes=frozenset({"registry:force"}))


def v(text: str) -> ModelVersion:
    found = parse_version(text)
    assert found is not None
    return found


def metadata(version: str = "1.0.0", model_id: str = "ranker", **changes) -> ModelMetadata:
    values = {
        "model_id": model_id,
        "name": "Ranker",
        "version": v(version),
        "framework": "pytorch",
        "input_shape": (4,),
        "output_shape": (2,),
        "size_bytes": 123,
        "checksum": "sha256:abc",
        "registered_at": NOON,
    }
    return ModelMetadata(**{**values, **changes})


def result(
    version: str = "1.0.0",
    *,
    model_id: str = "ranker",
    accuracy: float = 0.9,
    p99: float = 10.0,
    errors: tuple[str, ...] = (),
    passed: bool | None = None,
    samples: int | None = None,
) -> ValidationResult:
    return ValidationResult(
        model_id=model_id,
        version=v(version),
        passed=not errors if passed is None else passed,
        latency_p50_ms=p99 / 2,
        latency_p99_ms=p99,
        accuracy_score=accuracy,
        errors=errors,
        samples=samples,
    )


WAY_UP = (S.VALIDATING, S.STAGING, S.CANARY, S.PRODUCTION)


def bring(
    registry: ModelRegistry,
    version: str,
    state: DeploymentState,
    *,
    model_id: str = "ranker",
    accuracy: float = 0.9,
    p99: float = 10.0,
) -> None:
    """Take a registered version to `state` the ordinary way, with evidence where it is due."""
    way = (*WAY_UP, S.DEPRECATED, S.ARCHIVED)
    for step in way[: way.index(state) + 1] if state is not S.REGISTERED else ():
        if step in (S.STAGING, S.PRODUCTION):
            registry.record_validation(
                result(version, model_id=model_id, accuracy=accuracy, p99=p99)
            )
        registry.transition_state(model_id, v(version), step)
