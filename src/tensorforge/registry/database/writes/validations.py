"""Validation results: their checks, and their storage as evidence for the state that a version is in."""

from __future__ import annotations

import json

from tensorforge.errors import InvalidInputError
from tensorforge.registry.database.rows import or_null, to_validation, validation_query
from tensorforge.registry.database.tables import VALIDATIONS
from tensorforge.registry.database.writes.changes import Change
from tensorforge.registry.database.writes.registering import check_whole
from tensorforge.registry.domain.models import ValidationRecord, ValidationResult
from tensorforge.registry.domain.names import check_text
from tensorforge.validation import is_number

_MAX_ERRORS = 100


def check_result(result: ValidationResult) -> None:
    """`InvalidInputError` if a field has the wrong type or is out of range; it names the field."""
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


def store_result(change: Change, result: ValidationResult) -> ValidationRecord:
    """Store a checked result for the state that the version is in now."""
    version = change.find_version(result.version)
    change.connection.execute(
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
            recorded_us=change.now_us,
            recorded_by=change.actor.name,
        )
    )
    newest = validation_query(version["key"]).limit(1)
    row = change.connection.execute(newest).mappings().one()
    change.record(
        "validate",
        version=result.version,
        from_state=version["state"],
        to_state=version["state"],
        evidence={"validation": row["key"], "passed": result.passed},
    )
    return to_validation(result.model_id, result.version, row)
