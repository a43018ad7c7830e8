"""The statements that find models, versions and validations, and the conversion of their rows to values."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tensorforge.errors import NotFoundError
from tensorforge.registry.database.dialects import Joined
from tensorforge.registry.database.tables import (
    ALIASES,
    MODEL_TAGS,
    MODELS,
    TENSORS,
    VALIDATIONS,
    VERSION_TAGS,
    VERSIONS,
)
from tensorforge.registry.database.times import from_micros
from tensorforge.registry.domain.deployment_lifecycle import DeploymentState
from tensorforge.registry.domain.models import (
    Lineage,
    ModelMetadata,
    RegisteredModel,
    Shape,
    Sla,
    TensorSpec,
    ValidationRecord,
    ValidationResult,
)
from tensorforge.registry.domain.names import TAG_SEPARATORS
from tensorforge.registry.domain.versions import ModelVersion, require_version
from tensorforge.storage.prepared import Prepared, Row

_BETWEEN_TAGS, _AFTER_KEY = TAG_SEPARATORS
_NUMBERS = (VERSIONS.c.major, VERSIONS.c.minor, VERSIONS.c.patch)
VERSION_ORDER = sa.tuple_(*_NUMBERS)


def _tags_of(table: sa.Table, owner: sa.Column[Any], key: sa.Column[Any]) -> sa.ScalarSelect[str]:
    pair = table.c.tag + _AFTER_KEY + table.c.value
    return (
        sa.select(Joined(pair, sa.literal(_BETWEEN_TAGS)))
        .where(owner == key)
        .correlate(key.table)
        .scalar_subquery()
    )


_VERSION_ALIASES = (
    sa.select(Joined(ALIASES.c.alias, sa.literal(",")))
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


_NAMED = MODELS.c.model_id == sa.bindparam("model_id")
_MODEL_BY_ID = Prepared(sa.select(MODELS).where(_NAMED))
_LOCKED_MODEL_BY_ID = Prepared(sa.select(MODELS).where(_NAMED).with_for_update())
_MODEL_WITH_TAGS = Prepared(MODEL_QUERY.where(_NAMED))
VERSION_BY_PARTS = Prepared(
    VERSION_QUERY.where(_NAMED, *(column == sa.bindparam(column.name) for column in _NUMBERS))
)
VERSION_BY_NUMBER = Prepared(
    VERSION_QUERY.where(_NAMED, VERSIONS.c.number == sa.bindparam("number"))
)
VERSION_BY_ALIAS = Prepared(
    VERSION_QUERY.join(ALIASES, ALIASES.c.version_key == VERSIONS.c.key).where(
        _NAMED,
        ALIASES.c.model_key == MODELS.c.key,
        ALIASES.c.alias == sa.bindparam("alias"),
    )
)
_ALIASES_OF_MODEL = Prepared(
    sa.select(ALIASES.c.alias, VERSIONS.c.number, *_NUMBERS)
    .join_from(ALIASES, VERSIONS, ALIASES.c.version_key == VERSIONS.c.key)
    .where(ALIASES.c.model_key == sa.bindparam("model_key"))
    .order_by(ALIASES.c.alias)
)
_VERSION_BY_KEY = Prepared(sa.select(*_NUMBERS).where(VERSIONS.c.key == sa.bindparam("key")))


def find_model(connection: sa.Connection, model_id: str, *, lock: bool = False) -> Row:
    """The model's row.

    `NotFoundError` if there is none. `lock` blocks other writers until the transaction ends.
    """
    row = find_model_or_none(connection, model_id, lock=lock)
    if row is None:
        raise NotFoundError(f"no model is called {model_id[:200]!r}")
    return row


def find_model_or_none(
    connection: sa.Connection, model_id: str, *, lock: bool = False
) -> Row | None:
    """The model's row, or `None`."""
    query = _LOCKED_MODEL_BY_ID if lock else _MODEL_BY_ID
    return query.first(connection, {"model_id": model_id})


def find_version(connection: sa.Connection, model_id: str, version: ModelVersion) -> Row:
    """The version's row; `NotFoundError` says whether the model or only the version is missing."""
    row = find_version_or_none(connection, model_id, version)
    if row is None:
        find_model(connection, model_id)
        raise NotFoundError(f"the model {model_id!r} has no version {version}")
    return row


def find_version_or_none(
    connection: sa.Connection, model_id: str, version: ModelVersion
) -> Row | None:
    """The version's row, or `None`."""
    return VERSION_BY_PARTS.first(connection, {"model_id": model_id, **parts_of(version)})


def find_alias_or_none(connection: sa.Connection, model_id: str, alias: str) -> Row | None:
    """The row of the version that an alias points to, or `None`."""
    return VERSION_BY_ALIAS.first(connection, {"model_id": model_id, "alias": alias})


def parts_of(version: ModelVersion) -> dict[str, int]:
    """A version's three numbers as parameters of a statement."""
    return {"major": version.major, "minor": version.minor, "patch": version.patch}


def version_of(row: Row) -> ModelVersion:
    """The version in a row that has its three numbers."""
    return _version(row["major"], row["minor"], row["patch"])


# Many rows have the same version or lineage; these values are immutable, so one object serves them all.
_version = functools.lru_cache(maxsize=10_000)(ModelVersion)
_lineage = functools.lru_cache(maxsize=1_000)(
    lambda run_id, step, checkpoint_id, run_link, logged_model_id, experiment_id: Lineage(
        run_id=run_id,
        step=step,
        checkpoint_id=checkpoint_id,
        run_link=run_link,
        logged_model_id=logged_model_id,
        experiment_id=experiment_id,
    )
)
_LINEAGE = ("run_id", "step", "checkpoint_id", "run_link", "logged_model_id", "experiment_id")
_STATES = {state.value: state for state in DeploymentState}


def to_metadata(row: Row) -> ModelMetadata:
    """A row of `VERSION_QUERY` as a value."""
    return ModelMetadata(
        model_id=row["model_id"],
        name=row["name"],
        version=version_of(row),
        framework=row["framework"],
        input_shape=shape_of(row["input_shape"]),
        output_shape=shape_of(row["output_shape"]),
        size_bytes=row["size_bytes"],
        checksum=row["checksum"],
        registered_at=from_micros(row["registered_us"]),
        state=_STATES[row["state"]],
        tags=split_tags(row["tags"]),
        source=row["source"],
        description=row["description"],
        lineage=_lineage(*(row[name] for name in _LINEAGE)),
        registered_by=row["registered_by"],
        updated_at=from_micros(row["updated_us"]),
        number=row["number"],
        revision=row["revision"],
        aliases=split_aliases(row["aliases"]),
        download_uri=row["download_uri"],
        signature=row["signature"],
        signed_by=row["signed_by"],
    )


_RECORDED = (
    *("number", "major", "minor", "patch", "name", "framework", "input_shape", "output_shape"),
    *("size_bytes", "checksum", "registered_us", "source", "run_id", "step", "checkpoint_id"),
    *("run_link", "registered_by", "logged_model_id", "experiment_id", "download_uri"),
)
"""The columns of a version that never change after its registration, in the order in which they are hashed."""


def record_digest(row: Mapping[str, Any]) -> str:
    """A digest of everything about a version that never changes; the audit row of its registration has it."""
    canonical = json.dumps([row[name] for name in _RECORDED], separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


@functools.lru_cache(maxsize=1_000)
def shape_of(text: str) -> Shape:
    """A shape from its stored text."""
    return tuple(json.loads(text))


def read_model(connection: sa.Connection, model_id: str) -> RegisteredModel:
    """The model as a value; `NotFoundError` if there is none."""
    row = find_model_with_tags(connection, model_id)
    aliases = _ALIASES_OF_MODEL.all(connection, {"model_key": row["key"]})
    return to_model(row, aliases, _production(connection, row))


def find_model_with_tags(connection: sa.Connection, model_id: str) -> Row:
    """The model's row of `MODEL_QUERY`; `NotFoundError` if there is none."""
    row = _MODEL_WITH_TAGS.first(connection, {"model_id": model_id})
    if row is None:
        raise NotFoundError(f"no model is called {model_id[:200]!r}")
    return row


def to_model(row: Row, aliases: Sequence[Row], production: ModelVersion | None) -> RegisteredModel:
    """A row of `MODEL_QUERY` as a value, with the rows of its aliases and the version that serves."""
    return RegisteredModel(
        model_id=row["model_id"],
        description=row["description"],
        created_at=from_micros(row["created_us"]),
        updated_at=from_micros(row["updated_us"]),
        tags=split_tags(row["tags"]),
        aliases={alias["alias"]: version_of(alias) for alias in aliases},
        sla=to_sla(row),
        production=production,
        version_count=row["version_count"],
    )


def _production(connection: sa.Connection, row: Row) -> ModelVersion | None:
    if row["production_key"] is None:
        return None
    return version_of(_VERSION_BY_KEY.all(connection, {"key": row["production_key"]})[0])


def to_sla(row: Row) -> Sla | None:
    """The SLA in a model's row, or `None` if it has none."""
    if row["sla_max_latency_ms"] is None:
        return None
    return Sla(
        max_latency_ms=row["sla_max_latency_ms"],
        min_accuracy=row["sla_min_accuracy"],
        signed_by=tuple(row["sla_signed_by"].split()),
    )


def split_tags(joined: str | None) -> dict[str, str]:
    """The tags in a row of `VERSION_QUERY` or `MODEL_QUERY`, sorted by key."""
    if not joined:
        return {}
    pairs = [pair.split(_AFTER_KEY, 1) for pair in joined.split(_BETWEEN_TAGS)]
    pairs.sort()
    return dict(pairs)


def split_aliases(joined: str | None) -> tuple[str, ...]:
    """The aliases in a row of `VERSION_QUERY`, sorted."""
    return tuple(sorted(joined.split(","))) if joined else ()


_TENSORS_OF_VERSION = Prepared(
    sa.select(TENSORS.c.tensors).where(TENSORS.c.version_key == sa.bindparam("version_key"))
)


def tensors_of(connection: sa.Connection, version_key: int) -> dict[str, TensorSpec]:
    """The tensors that were declared when the version was registered; empty if none were."""
    row = _TENSORS_OF_VERSION.first(connection, {"version_key": version_key})
    return decode_tensors(None if row is None else row["tensors"])


def decode_tensors(text: str | None) -> dict[str, TensorSpec]:
    """Declared tensors from their stored text, which may be missing."""
    if text is None:
        return {}
    return {
        name: TensorSpec(dtype, tuple(shape)) for name, (dtype, shape) in json.loads(text).items()
    }


def encode_tensors(tensors: Mapping[str, TensorSpec]) -> str:
    """Declared tensors as the text that `decode_tensors` reads."""
    return json.dumps({name: [spec.dtype, list(spec.shape)] for name, spec in tensors.items()})


def validation_query(version_key: int) -> sa.Select[Any]:
    """A query for a version's validations, the newest first."""
    return (
        sa.select(VALIDATIONS)
        .where(VALIDATIONS.c.version_key == version_key)
        .order_by(VALIDATIONS.c.key.desc())
    )


def latest_validation(
    connection: sa.Connection, model_id: str, version: Row
) -> ValidationRecord | None:
    """The newest validation of a version, or `None`."""
    query = validation_query(version["key"]).limit(1)
    row = connection.execute(query).mappings().one_or_none()
    return None if row is None else to_validation(model_id, version_of(version), row)


def to_validation(model_id: str, version: ModelVersion, row: Row) -> ValidationRecord:
    """A row of the table of validations as a value."""
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
    """A measured figure as it is stored: NaN as NULL, since SQLite has no NaN."""
    return None if math.isnan(value) else value


def parse_stored_version(text: str | None) -> ModelVersion | None:
    """A version from its stored text, or `None` from NULL."""
    return None if text is None else require_version(text)
