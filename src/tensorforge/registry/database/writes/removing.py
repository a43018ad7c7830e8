"""Removal of versions and models. A version that serves cannot be removed; the audit keeps the history."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from tensorforge.errors import ConflictError
from tensorforge.registry.database import tables
from tensorforge.registry.database.rows import version_of
from tensorforge.registry.database.tables import ALIASES, MODEL_TAGS, MODELS, VERSIONS
from tensorforge.registry.database.writes.changes import Change
from tensorforge.registry.domain.deployment_lifecycle import SERVING_STATES
from tensorforge.storage.prepared import Row

_SERVING = tuple(state.value for state in SERVING_STATES)


def remove_version(change: Change, version: Row) -> None:
    """Remove a version; `ConflictError` if it is in canary or production."""
    _refuse_serving(change, [version])
    _delete_versions(change.connection, [version["key"]])
    change.update_model(version_count=MODELS.c.version_count - 1)
    change.record(
        "delete_version",
        version=version_of(version),
        from_state=version["state"],
        evidence={"number": version["number"], "checksum": version["checksum"]},
    )


def remove_model(change: Change) -> None:
    """Remove the model and its versions; `ConflictError` if one of them is in canary or production."""
    connection, key = change.connection, change.model["key"]
    rows = list(
        connection.execute(sa.select(VERSIONS).where(VERSIONS.c.model_key == key)).mappings()
    )
    _refuse_serving(change, rows)
    connection.execute(ALIASES.delete().where(ALIASES.c.model_key == key))
    _delete_versions(connection, [row["key"] for row in rows])
    connection.execute(MODEL_TAGS.delete().where(MODEL_TAGS.c.model_key == key))
    connection.execute(MODELS.delete().where(MODELS.c.key == key))
    change.record("delete_model", evidence={"versions": len(rows)})


def _delete_versions(connection: sa.Connection, keys: list[int]) -> None:
    for table in (ALIASES, tables.VERSION_TAGS, tables.TENSORS, tables.VALIDATIONS):
        connection.execute(table.delete().where(table.c.version_key.in_(keys)))
    connection.execute(VERSIONS.delete().where(VERSIONS.c.key.in_(keys)))


def _refuse_serving(change: Change, rows: Sequence[Row]) -> None:
    for row in rows:
        if row["state"] in _SERVING:
            raise ConflictError(
                f"{change.model_id} {version_of(row)} is in {row['state']}: a version that serves "
                "cannot be deleted; roll it back or deprecate it first"
            )
