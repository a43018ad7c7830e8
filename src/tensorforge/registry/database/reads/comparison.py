"""The comparison of two versions of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from tensorforge.registry.database.rows import (
    find_version,
    latest_validation,
    shape_of,
    tensors_of,
    to_metadata,
)
from tensorforge.registry.domain.models import ModelMetadata, ValidationResult
from tensorforge.registry.domain.selection import RollbackAssessment, assess_rollback
from tensorforge.registry.domain.shapes import DueBump, Interface, due_bump, shape_compatibility
from tensorforge.registry.domain.versions import ModelVersion
from tensorforge.storage.prepared import Row

_COMPARED = (
    "framework",
    "input_shape",
    "output_shape",
    "size_bytes",
    "checksum",
    "source",
    "state",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDiff:
    """Two versions and their differences. `fields` and `tags` have only what differs, as (before, after)."""

    before: ModelMetadata
    after: ModelMetadata
    due: DueBump
    compatibility: float
    fields: Mapping[str, tuple[str, str]]
    tags: Mapping[str, tuple[str | None, str | None]]
    validations: tuple[ValidationResult | None, ValidationResult | None]
    rollback: RollbackAssessment | None


def compare(
    connection: sa.Connection, model_id: str, before: ModelVersion, after: ModelVersion
) -> VersionDiff:
    """Compare two versions; `NotFoundError` if one is missing.

    `rollback` assesses a rollback from `after` to `before` by their newest validations, if both have one.
    """
    rows = [find_version(connection, model_id, version) for version in (before, after)]
    old, new = (to_metadata(row) for row in rows)
    records = [latest_validation(connection, model_id, row) for row in rows]
    first, second = (None if record is None else record.result for record in records)
    return VersionDiff(
        before=old,
        after=new,
        due=due_bump(*(_interface(connection, row) for row in rows)),
        compatibility=shape_compatibility(
            old.input_shape, old.output_shape, new.input_shape, new.output_shape
        ),
        fields=_changed_fields(old, new),
        tags=_changed_tags(old.tags, new.tags),
        validations=(first, second),
        rollback=None if first is None or second is None else assess_rollback(second, first),
    )


def _interface(connection: sa.Connection, row: Row) -> Interface:
    tensors = tensors_of(connection, row["key"])
    return Interface(shape_of(row["input_shape"]), shape_of(row["output_shape"]), tensors)


def _changed_fields(old: ModelMetadata, new: ModelMetadata) -> dict[str, tuple[str, str]]:
    pairs = {field: (_shown(old, field), _shown(new, field)) for field in _COMPARED}
    return {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}


def _shown(metadata: ModelMetadata, field: str) -> str:
    value = getattr(metadata, field)
    return str(list(value)) if isinstance(value, tuple) else str(getattr(value, "value", value))


def _changed_tags(
    old: Mapping[str, str], new: Mapping[str, str]
) -> dict[str, tuple[str | None, str | None]]:
    keys = sorted(old.keys() | new.keys())
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}
