"""Removing versions and models. What serves cannot be removed, and the audit keeps the history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from tensorforge.errors import ConflictError
from tensorforge.registry.database.audit import AuditFact
from tensorforge.registry.database.rows import version_of
from tensorforge.registry.database.tables import (
    ALIASES,
    MODEL_TAGS,
    MODELS,
    TENSORS,
    VALIDATIONS,
    VERSION_TAGS,
    VERSIONS,
)
from tensorforge.registry.database.writes import changes
from tensorforge.registry.database.writes.descriptions import touch_model
from tensorforge.registry.domain.deployment_lifecycle import SERVING_STATES
from tensorforge.registry.domain.models import Actor
from tensorforge.storage.prepared import Row

_SERVING = tuple(state.value for state in SERVING_STATES)


def remove_version(
    connection: sa.Connection, model: Row, version: Row, actor: Actor, now_us: int
) -> None:
    """Remove a version of a locked model; `ConflictError` if it serves."""
    _refuse_serving(model, [version])
    _remove(connection, [version["key"]])
    touch_model(connection, model, now_us, version_count=MODELS.c.version_count - 1)
    fact = AuditFact(
        actor=actor.name,
        action="delete_version",
        model_key=model["key"],
        model_id=model["model_id"],
        version=str(version_of(version)),
        from_state=version["state"],
        evidence={"number": version["number"], "checksum": version["checksum"]},
    )
    changes.record(connection, fact, now_us)


def remove_model(connection: sa.Connection, model: Row, actor: Actor, now_us: int) -> None:
    """Remove a locked model and its versions; `ConflictError` if one of them serves."""
    query = sa.select(VERSIONS).where(VERSIONS.c.model_key == model["key"])
    rows = list(connection.execute(query).mappings())
    _refuse_serving(model, rows)
    connection.execute(ALIASES.delete().where(ALIASES.c.model_key == model["key"]))
    _remove(connection, [row["key"] for row in rows])
    connection.execute(MODEL_TAGS.delete().where(MODEL_TAGS.c.model_key == model["key"]))
    connection.execute(MODELS.delete().where(MODELS.c.key == model["key"]))
    fact = AuditFact(
        actor=actor.name,
        action="delete_model",
        model_key=model["key"],
        model_id=model["model_id"],
        evidence={"versions": len(rows)},
    )
    changes.record(connection, fact, now_us)


def _remove(connection: sa.Connection, keys: list[int]) -> None:
    for table in (ALIASES, VERSION_TAGS, TENSORS, VALIDATIONS):
        connection.execute(table.delete().where(table.c.version_key.in_(keys)))
    connection.execute(VERSIONS.delete().where(VERSIONS.c.key.in_(keys)))


def _refuse_serving(model: Row, rows: Sequence[Any]) -> None:
    for row in rows:
        if row["state"] in _SERVING:
            raise ConflictError(
                f"{model['model_id']} {version_of(row)} is in {row['state']}: "
                "what serves cannot be deleted; roll it back or deprecate it first"
            )
