"""From rows to values: the statements that read models and versions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tensorforge.errors import NotFoundError
from tensorforge.registry.lifecycle import DeploymentState
from tensorforge.registry.models import (
    Lineage,
    ModelMetadata,
    RegisteredModel,
    Sla,
    TensorSpec,
    ValidationRecord,
    ValidationResult,
)
from tensorforge.registry.names import TAG_SEPARATORS
from tensorforge.registry.schema import (
    ALIASES,
    MODEL_TAGS,
    MODELS,
    TENSORS,
    VALIDATIONS,
    VERSION_TAGS,
    VERSIONS,
)
from tensorforge.registry.times import from_micros
from tensorforge.registry.versions import ModelVersion, require_version

Row = Mapping[Any, Any]

_BETWEEN_TAGS, _AFTER_KEY = TAG_SEPARATORS
_NUMBERS = (VERSIONS.c.major, VERSIONS.c.minor, VERSIONS.c.patch)
VERSION_ORDER = sa.tuple_(*_NUMBERS)


def _tags_of(table: sa.Table, owner: sa.Column[Any], key: sa.Column[Any]) -> sa.ScalarSelect[str]:
    pair = table.c.tag + _AFTER_KEY + table.c.value
    return (
        sa.select(sa.func.aggregate_strings(pair, _BETWEEN_TAGS))
        .where(owner == key)
        .correlate(key.table)
        .scalar_subquery()
    )


_VERSION_ALIASES = (
    sa.select(sa.func.aggregate_strings(ALIASES.c.alias, ","))
    .where(ALIASES.c.version_key == VERSIONS.c.key)
    .correlate(VERSIONS)
    .scalar_subquery()
)

VERSION_QUERY = sa.select(
    VERSIONS,
    MODELS.c.model_id,
    _tags_of(VERSION_TAGS, VERSION_TAGS.c.version_key, VERSIONS.c.key).label("tags"),
    _VERSION_ALIASES.label("aliases"),
).join_from(VERSIONS, MODELS)
"""A version with its model's id, tags and aliases in one row."""

MODEL_QUERY = sa.select(
    MODELS, _tags_of(MODEL_TAGS, MODEL_TAGS.c.model_key, MODELS.c.key).label("tags")
)
"""A model with its tags in one row."""


# Statements that every request runs are built once: building them costs more than running them.
_MODEL_BY_ID = sa.select(MODELS).where(MODELS.c.model_id == sa.bindparam("model_id"))
_LOCKED_MODEL_BY_ID = _MODEL_BY_ID.with_for_update()
_VERSION_BY_PARTS = VERSION_QUERY.where(
    MODELS.c.model_id == sa.bindparam("model_id"),
    *(column == sa.bindparam(column.name) for column in _NUMBERS),
)
_VERSION_BY_NUMBER = VERSION_QUERY.where(
    MODELS.c.model_id == sa.bindparam("model_id"), VERSIONS.c.number == sa.bindparam("number")
)


def find_model(connection: sa.Connection, model_id: str, *, lock: bool = False) -> Row:
    """The model's row; `NotFoundError` if there is none. `lock` keeps other writers out until the end."""
    row = look_for_model(connection, model_id, lock=lock)
    if row is None:
        raise NotFoundError(f"no model is called {model_id[:200]!r}")
    return row


def look_for_model(connection: sa.Connection, model_id: str, *, lock: bool = False) -> Row | None:
    """The model's row, or `None`."""
    query = _LOCKED_MODEL_BY_ID if lock else _MODEL_BY_ID
    return connection.execute(query, {"model_id": model_id}).mappings().one_or_none()


def find_version(connection: sa.Connection, model_id: str, version: ModelVersion) -> Row:
    """The version's row; `NotFoundError` says what there is instead."""
    row = look_for_version(connection, model_id, version)
    if row is None:
        find_model(connection, model_id)
        raise NotFoundError(f"the model {model_id!r} has no version {version}")
    return row


def look_for_version(connection: sa.Connection, model_id: str, version: ModelVersion) -> Row | None:
    """The version's row, or `None`."""
    values = {"model_id": model_id, **_parts(version)}
    return connection.execute(_VERSION_BY_PARTS, values).mappings().one_or_none()


def look_for_number(connection: sa.Connection, model_id: str, number: int) -> Row | None:
    """The row of the version with this place in the order of registration, or `None`."""
    values = {"model_id": model_id, "number": number}
    return connection.execute(_VERSION_BY_NUMBER, values).mappings().one_or_none()


def _parts(version: ModelVersion) -> dict[str, int]:
    return {"major": version.major, "minor": version.minor, "patch": version.patch}


def version_of(row: Row) -> ModelVersion:
    """The number in a row of versions."""
    return ModelVersion(row["major"], row["minor"], row["patch"])


def to_metadata(row: Row) -> ModelMetadata:
    """A row of `VERSION_QUERY` as a value."""
    return ModelMetadata(
        model_id=row["model_id"],
        name=row["name"],
        version=version_of(row),
        framework=row["framework"],
        input_shape=tuple(json.loads(row["input_shape"])),
        output_shape=tuple(json.loads(row["output_shape"])),
        size_bytes=row["size_bytes"],
        checksum=row["checksum"],
        registered_at=from_micros(row["registered_us"]),
        state=DeploymentState(row["state"]),
        tags=_split_tags(row["tags"]),
        source=row["source"],
        description=row["description"],
        lineage=Lineage(
            run_id=row["run_id"],
            step=row["step"],
            checkpoint_id=row["checkpoint_id"],
            run_link=row["run_link"],
        ),
        registered_by=row["registered_by"],
        updated_at=from_micros(row["updated_us"]),
        number=row["number"],
        revision=row["revision"],
        aliases=tuple(sorted(row["aliases"].split(","))) if row["aliases"] else (),
    )


def to_model(connection: sa.Connection, row: Row) -> RegisteredModel:
    """A row of `MODEL_QUERY` as a value, with what its aliases point to."""
    aliases = connection.execute(
        sa.select(ALIASES.c.alias, *_NUMBERS)
        .join_from(ALIASES, VERSIONS, ALIASES.c.version_key == VERSIONS.c.key)
        .where(ALIASES.c.model_key == row["key"])
        .order_by(ALIASES.c.alias)
    ).mappings()
    return RegisteredModel(
        model_id=row["model_id"],
        description=row["description"],
        created_at=from_micros(row["created_us"]),
        updated_at=from_micros(row["updated_us"]),
        tags=_split_tags(row["tags"]),
        aliases={alias["alias"]: version_of(alias) for alias in aliases},
        sla=to_sla(row),
        production=_production(connection, row),
        version_count=row["version_count"],
    )


def _production(connection: sa.Connection, row: Row) -> ModelVersion | None:
    if row["production_key"] is None:
        return None
    query = sa.select(*_NUMBERS).where(VERSIONS.c.key == row["production_key"])
    return version_of(connection.execute(query).mappings().one())


def to_sla(row: Row) -> Sla | None:
    """The SLA in a model's row."""
    if row["sla_max_latency_ms"] is None:
        return None
    return Sla(max_latency_ms=row["sla_max_latency_ms"], min_accuracy=row["sla_min_accuracy"])


def _split_tags(joined: str | None) -> dict[str, str]:
    if not joined:
        return {}
    pairs = (pair.split(_AFTER_KEY, 1) for pair in joined.split(_BETWEEN_TAGS))
    return dict(sorted((key, value) for key, value in pairs))


def tensors_of(connection: sa.Connection, version_key: int) -> dict[str, TensorSpec]:
    """The tensors that were declared at registration; empty if none were."""
    text = connection.scalar(
        sa.select(TENSORS.c.tensors).where(TENSORS.c.version_key == version_key)
    )
    if text is None:
        return {}
    return {
        name: TensorSpec(dtype, tuple(shape)) for name, (dtype, shape) in json.loads(text).items()
    }


def encode_tensors(tensors: Mapping[str, TensorSpec]) -> str:
    """What `tensors_of` reads."""
    return json.dumps({name: [spec.dtype, list(spec.shape)] for name, spec in tensors.items()})


def validation_query(version_key: int) -> sa.Select[Any]:
    """A version's validations, the newest first."""
    return (
        sa.select(VALIDATIONS)
        .where(VALIDATIONS.c.version_key == version_key)
        .order_by(VALIDATIONS.c.key.desc())
    )


def latest_validation(
    connection: sa.Connection, model_id: str, version: Row
) -> ValidationRecord | None:
    """The newest validation of a version."""
    query = validation_query(version["key"]).limit(1)
    row = connection.execute(query).mappings().one_or_none()
    return None if row is None else to_validation(model_id, version_of(version), row)


def to_validation(model_id: str, version: ModelVersion, row: Row) -> ValidationRecord:
    """A row of validations as a value."""
    result = ValidationResult(
        model_id=model_id,
        version=version,
        passed=row["passed"],
        latency_p50_ms=_or_nan(row["latency_p50_ms"]),
        latency_p99_ms=_or_nan(row["latency_p99_ms"]),
        accuracy_score=_or_nan(row["accuracy_score"]),
        errors=tuple(json.loads(row["errors"])),
        samples=row["samples"],
    )
    return ValidationRecord(
        record_id=row["key"],
        result=result,
        state=DeploymentState(row["state"]),
        revision=row["revision"],
        recorded_at=from_micros(row["recorded_us"]),
        recorded_by=row["recorded_by"],
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def or_null(value: float) -> float | None:
    """How a measured figure is stored: SQLite has no NaN."""
    return None if math.isnan(value) else value


def insert_if_absent(connection: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> bool:
    """Insert a row unless one with the same key is there, and tell whether it was inserted.

    A racing writer of the same key is waited for.
    """
    dialect: Any = sqlite if connection.dialect.name == "sqlite" else postgresql
    statement = dialect.insert(table).values(dict(values)).on_conflict_do_nothing()
    inserted = connection.execute(statement.returning(*table.primary_key.columns))
    return inserted.one_or_none() is not None


def parse_stored_version(text: str | None) -> ModelVersion | None:
    """A version that was stored as text."""
    return None if text is None else require_version(text)
