"""Models with the newest version in each of MLflow's stages, read by a fixed number of statements per page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tensorforge.registry.database.rows import (
    VERSION_ORDER,
    VERSION_QUERY,
    to_metadata,
    to_model,
    version_of,
)
from tensorforge.registry.database.tables import ALIASES, MODELS, VERSIONS
from tensorforge.registry.domain.deployment_lifecycle import DeploymentState
from tensorforge.registry.domain.mlflow_stages import STAGES
from tensorforge.registry.domain.models import ModelMetadata, RegisteredModel
from tensorforge.storage.prepared import Row

_CHUNK = 500


@dataclass(frozen=True, slots=True)
class ModelOverview:
    """A model, the newest version in each stage that has one, and the numbers that its aliases point at."""

    model: RegisteredModel
    latest: tuple[ModelMetadata, ...]
    alias_numbers: Mapping[str, int]


def _newest_in(state: DeploymentState) -> sa.ColumnElement[Any]:
    """The key of a model's highest version in a state; for production, of the version that serves."""
    if state is DeploymentState.PRODUCTION:
        return MODELS.c.production_key.label(state.value)
    query = (
        sa.select(VERSIONS.c.key)
        .where(VERSIONS.c.model_key == MODELS.c.key, VERSIONS.c.state == state.value)
        .order_by(*(column.desc() for column in VERSION_ORDER.clauses))
        .limit(1)
    )
    return query.correlate(MODELS).scalar_subquery().label(state.value)


_NEWEST = sa.select(MODELS.c.key, *(_newest_in(state) for state in DeploymentState))
_ALIAS_NUMBERS = (
    sa.select(
        ALIASES.c.model_key,
        ALIASES.c.alias,
        VERSIONS.c.number,
        *(column for column in VERSION_ORDER.clauses),
    )
    .join_from(ALIASES, VERSIONS, ALIASES.c.version_key == VERSIONS.c.key)
    .order_by(ALIASES.c.model_key, ALIASES.c.alias)
)


def read_overviews(connection: sa.Connection, rows: Sequence[Row]) -> list[ModelOverview]:
    """The overviews of models from rows of `MODEL_QUERY`, in the same order."""
    return [each for part in _chunks(rows) for each in _read(connection, part)]


def to_models(connection: sa.Connection, rows: Sequence[Row]) -> list[RegisteredModel]:
    """Rows of `MODEL_QUERY` as values, by two statements for hundreds of them."""
    return [each for part in _chunks(rows) for each in _models(connection, part)]


def _chunks(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), _CHUNK):
        yield rows[start : start + _CHUNK]


def _models(connection: sa.Connection, rows: Sequence[Row]) -> list[RegisteredModel]:
    aliases = _aliases(connection, [row["key"] for row in rows])
    serving = _serving(connection, rows)
    return [to_model(row, aliases[row["key"]], serving.get(row["production_key"])) for row in rows]


def _read(connection: sa.Connection, rows: Sequence[Row]) -> list[ModelOverview]:
    keys = [row["key"] for row in rows]
    aliases, latest = _aliases(connection, keys), _latest(connection, keys)
    found = []
    for row in rows:
        newest = latest[row["key"]]
        serving = next((v.version for v in newest if v.state is DeploymentState.PRODUCTION), None)
        model = to_model(row, aliases[row["key"]], serving)
        numbers = {alias["alias"]: alias["number"] for alias in aliases[row["key"]]}
        found.append(ModelOverview(model, tuple(newest), numbers))
    return found


def _aliases(connection: sa.Connection, keys: list[int]) -> Mapping[int, list[Row]]:
    found: defaultdict[int, list[Row]] = defaultdict(list)
    query = _ALIAS_NUMBERS.where(ALIASES.c.model_key.in_(keys))
    for row in connection.execute(query).mappings():
        found[row["model_key"]].append(row)
    return found


def _serving(connection: sa.Connection, rows: Sequence[Row]) -> dict[int, Any]:
    keys = [row["production_key"] for row in rows if row["production_key"] is not None]
    query = sa.select(VERSIONS.c.key, *VERSION_ORDER.clauses).where(VERSIONS.c.key.in_(keys))
    return {row["key"]: version_of(row) for row in connection.execute(query).mappings()}


def _latest(connection: sa.Connection, keys: list[int]) -> Mapping[int, list[ModelMetadata]]:
    newest = connection.execute(_NEWEST.where(MODELS.c.key.in_(keys))).mappings().all()
    wanted = {row[s.value] for row in newest for s in DeploymentState} - {None}
    versions = {}
    for part in _chunks(sorted(wanted)):
        query = VERSION_QUERY.where(VERSIONS.c.key.in_(part))
        for row in connection.execute(query).mappings():
            versions[row["key"]] = to_metadata(row)
    return {row["key"]: list(_by_stage(row, versions)) for row in newest}


def _by_stage(row: Row, versions: Mapping[int, ModelMetadata]) -> Iterator[ModelMetadata]:
    for states in STAGES.values():
        found = [versions[row[s.value]] for s in states if row[s.value] is not None]
        if found:
            yield max(found, key=lambda metadata: metadata.version)
