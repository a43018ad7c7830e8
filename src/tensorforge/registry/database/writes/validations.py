"""Validations as evidence: checked and kept, for the state that the version is in."""

from __future__ import annotations

import json

import sqlalchemy as sa

from tensorforge.errors import InvalidInputError
from tensorforge.registry.database.audit import AuditFact
from tensorforge.registry.database.rows import (
    find_version,
    or_null,
    to_validation,
    validation_query,
)
from tensorforge.registry.database.tables import VALIDATIONS
from tensorforge.registry.database.writes import changes
from tensorforge.registry.database.writes.registering import check_whole
from tensorforge.registry.domain.models import Actor, ValidationRecord, ValidationResult
from tensorforge.registry.domain.names import check_text
from tensorforge.storage.prepared import Row
from tensorforge.validation import is_number

_MAX_ERRORS = 100


def check_result(result: ValidationResult) -> None:
    """Refuse what was not measured in numbers; `InvalidInputError` names the field."""
    if not isinstance(result.passed, bool):
        raise InvalidInputError(f"passed = {result.passed!r}: must be True or False")
    for field in ("latency_p50_ms", "latency_p99_ms", "accuracy_score"):
        value = getattr(result, field)
        if not is_number(value):
            raise InvalidInputError(f"{field} = {value!r}: must be a number")
        if field.startswith("latency") and value < 0:
            raise InvalidInputError(f"{field} = {value!r}: must not be negative")
    if len(result.errors) > _MAX_ERRORS:
        raise InvalidInputError(f"{len(result.errors)} errors are more than {_MAX_ERRORS}")
    for error in result.errors:
        check_text("an error", error)
    if result.samples is not None:
        check_whole("samples", result.samples)


def keep_result(
    connection: sa.Connection, model: Row, result: ValidationResult, actor: Actor, now_us: int
) -> ValidationRecord:
    """Write a checked result for a version of a locked model."""
    version = find_version(connection, result.model_id, result.version)
    connection.execute(
        VALIDATIONS.insert().values(
            version_key=version["key"],
            state=version["state"],
            revision=version["revision"],
            passed=result.passed,
            latency_p50_ms=or_null(result.latency_p50_ms),
            latency_p99_ms=or_null(result.latency_p99_ms),
            accuracy_score=or_null(result.accuracy_score),
            errors=json.dumps(result.errors),
            samples=result.samples,
            recorded_us=now_us,
            recorded_by=actor.name,
        )
    )
    row = connection.execute(validation_query(version["key"]).limit(1)).mappings().one()
    fact = AuditFact(
        actor=actor.name,
        action="validate",
        model_key=model["key"],
        model_id=result.model_id,
        version=str(result.version),
        from_state=version["state"],
        to_state=version["state"],
        evidence={"validation": row["key"], "passed": result.passed},
    )
    changes.record(connection, fact, now_us)
    return to_validation(result.model_id, result.version, row)
