"""Registration of models and versions.

A new version is checked, compared with the nearest existing version of the same major version, given the next
number of its model, and inserted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from tensorforge.errors import AlreadyExistsError, ConflictError, InvalidInputError
from tensorforge.registry.database.dialects import insert_if_absent
from tensorforge.registry.database.rows import (
    VERSION_ORDER,
    decode_tensors,
    encode_tensors,
    find_model,
    find_model_or_none,
    parts_of,
    record_digest,
    shape_of,
    version_of,
)
from tensorforge.registry.database.tables import MODEL_TAGS, MODELS, TENSORS, VERSION_TAGS, VERSIONS
from tensorforge.registry.database.times import from_micros, to_micros
from tensorforge.registry.database.writes.changes import Change
from tensorforge.registry.database.writes.labels import insert_tags
from tensorforge.registry.domain.deployment_lifecycle import DeploymentState
from tensorforge.registry.domain.models import Actor, Lineage, ModelMetadata, Shape, TensorSpec
from tensorforge.registry.domain.names import MAX_TEXT, check_name, check_tags, check_text
from tensorforge.registry.domain.shapes import DueBump, Interface, due_bump
from tensorforge.registry.domain.versions import Bump, ModelVersion
from tensorforge.storage.prepared import Prepared, Row
from tensorforge.validation import is_whole_number

FIRST_VERSION = ModelVersion(1, 0, 0)
_MAX_AXES = 64
_MAX_WHOLE = 2**63 - 1
_BUMPS = list(Bump)


def check_metadata(metadata: ModelMetadata) -> ModelMetadata:
    """The metadata with every field checked; `InvalidInputError` names the first wrong field."""
    if metadata.state is not DeploymentState.REGISTERED:
        raise InvalidInputError(
            f"state = {metadata.state}: a new version must be in the state registered"
        )
    if not isinstance(metadata.version, ModelVersion):
        raise InvalidInputError(f"version = {metadata.version!r}: must be a ModelVersion")
    return replace(
        metadata,
        model_id=check_name("model_id", metadata.model_id),
        name=check_text("name", metadata.name, limit=500),
        framework=check_text("framework", metadata.framework, limit=100),
        input_shape=check_shape("input_shape", metadata.input_shape),
        output_shape=check_shape("output_shape", metadata.output_shape),
        size_bytes=check_whole("size_bytes", metadata.size_bytes),
        checksum=check_text("checksum", metadata.checksum, limit=500),
        source=check_text("source", metadata.source, limit=2_000),
        description=check_text("description", metadata.description, limit=MAX_TEXT),
        tags=check_tags(metadata.tags),
        lineage=_check_lineage(metadata.lineage),
        download_uri=check_text("download_uri", metadata.download_uri, limit=2_000),
        signature="",
        signed_by="",
    )


def check_shape(field: str, shape: object) -> Shape:
    """The shape as a tuple; `InvalidInputError` unless it has at most 64 sizes, none negative."""
    if not isinstance(shape, (tuple, list)) or len(shape) > _MAX_AXES:
        raise InvalidInputError(f"{field} must be a list of at most {_MAX_AXES} whole numbers")
    return tuple(check_whole(f"{field}[{axis}]", size) for axis, size in enumerate(shape))


def check_whole(field: str, value: object) -> int:
    """The number.

    `InvalidInputError` unless it is a whole number from 0 to 2⁶³ - 1, which both databases can store.
    """
    if not is_whole_number(value):
        raise InvalidInputError(f"{field} = {str(value)[:60]!r}: must be a whole number")
    if not 0 <= value <= _MAX_WHOLE:
        raise InvalidInputError(f"{field} = {value}: must lie between 0 and {_MAX_WHOLE}")
    return value


def _check_lineage(lineage: Lineage) -> Lineage:
    return Lineage(
        run_id=check_text("run_id", lineage.run_id, limit=500),
        step=None if lineage.step is None else check_whole("step", lineage.step),
        checkpoint_id=check_text("checkpoint_id", lineage.checkpoint_id, limit=500),
        run_link=check_text("run_link", lineage.run_link, limit=2_000),
        logged_model_id=check_text("logged_model_id", lineage.logged_model_id, limit=500),
        experiment_id=check_text("experiment_id", lineage.experiment_id, limit=500),
    )


_MODEL_COLUMNS = [column.name for column in MODELS.columns if column.name != "key"]
_ADD_MODEL = insert_if_absent(MODELS, _MODEL_COLUMNS)
_NEW_MODEL = dict.fromkeys(_MODEL_COLUMNS) | {
    "last_number": 0,
    "version_count": 0,
    "sla_signed_by": "",
}


def open_model(
    connection: sa.Connection, model_id: str, actor: Actor, now_us: int, *, must_exist: bool
) -> Change:
    """Begin a change to a model, which is created if it does not exist.

    With `must_exist` a missing model is a `NotFoundError`.
    """
    find = find_model if must_exist else find_model_or_none
    row = find(connection, model_id, lock=True)
    if row is None:
        return create_model(connection, model_id, actor, now_us, exist_ok=True)
    return Change(connection, row, actor, now_us)


def create_model(
    connection: sa.Connection,
    model_id: str,
    actor: Actor,
    now_us: int,
    *,
    description: str = "",
    tags: Mapping[str, str] | None = None,
    exist_ok: bool = False,
) -> Change:
    """Create a model without versions and begin a change to it.

    `AlreadyExistsError` if the name is taken, unless `exist_ok`.
    """
    values = {"model_id": model_id, "description": description}
    times = {"created_us": now_us, "updated_us": now_us}
    created = _ADD_MODEL.first(connection, _NEW_MODEL | values | times)
    if created is None:
        if not exist_ok:
            raise AlreadyExistsError(f"there is a model called {model_id!r} already")
        return Change(connection, find_model(connection, model_id, lock=True), actor, now_us)
    change = Change(connection, created, actor, now_us)
    insert_tags(connection, MODEL_TAGS, "model_key", created["key"], tags or {})
    change.record("create_model")
    return change


_ADD_VERSION = Prepared(
    VERSIONS.insert().returning(VERSIONS.c.key),
    columns=[column.name for column in VERSIONS.columns if column.name != "key"],
)
_ADD_TENSORS = Prepared(TENSORS.insert(), columns=["version_key", "tensors"])
_COUNT_VERSION = Prepared(
    MODELS.update()
    .where(MODELS.c.key == sa.bindparam("of_model"))
    .values(
        last_number=sa.bindparam("number"),
        version_count=MODELS.c.version_count + 1,
        updated_us=sa.bindparam("now_us"),
    )
)


def register_version(
    change: Change, metadata: ModelMetadata, tensors: Mapping[str, TensorSpec]
) -> ModelMetadata:
    """Register checked metadata under the version that it names; returns what was stored.

    `AlreadyExistsError` if the version is taken; `ConflictError` if its shapes would break users of the nearest
    version of the same major version.
    """
    _refuse_hidden_break(change, metadata, tensors)
    return _insert_version(change, metadata, tensors)


def register_next_version(
    change: Change, metadata: ModelMetadata, tensors: Mapping[str, TensorSpec], least: Bump
) -> tuple[ModelMetadata, DueBump]:
    """Register checked metadata under the next version; returns what was stored and why this bump was due.

    The bump is the one that the change of shapes since the highest version needs, at least `least`.
    """
    version, due = _next_version(change, metadata, tensors, least)
    return _insert_version(change, replace(metadata, version=version), tensors), due


def _insert_version(
    change: Change, metadata: ModelMetadata, tensors: Mapping[str, TensorSpec]
) -> ModelMetadata:
    connection, model, now_us = change.connection, change.model, change.now_us
    number = model["last_number"] + 1
    values = _values(change, metadata, number)
    version_key = _ADD_VERSION.all(connection, values)[0]["key"]
    if metadata.tags:
        insert_tags(connection, VERSION_TAGS, "version_key", version_key, metadata.tags)
    if tensors:
        declared = {"version_key": version_key, "tensors": encode_tensors(tensors)}
        _ADD_TENSORS.run(connection, declared)
    counted = {"of_model": model["key"], "number": number, "now_us": now_us}
    _COUNT_VERSION.run(connection, counted)
    change.record(
        "register",
        version=metadata.version,
        to_state=DeploymentState.REGISTERED.value,
        evidence={
            "checksum": metadata.checksum,
            "number": number,
            "record": record_digest(values),
        },
    )
    return replace(
        metadata,
        tags=dict(sorted(metadata.tags.items())),
        registered_by=change.actor.name,
        updated_at=from_micros(now_us),
        number=number,
        revision=0,
        aliases=(),
    )


def _values(change: Change, metadata: ModelMetadata, number: int) -> dict[str, Any]:
    return {
        "model_key": change.model["key"],
        "number": number,
        **parts_of(metadata.version),
        "name": metadata.name,
        "framework": metadata.framework,
        "input_shape": json.dumps(metadata.input_shape),
        "output_shape": json.dumps(metadata.output_shape),
        "size_bytes": metadata.size_bytes,
        "checksum": metadata.checksum,
        "registered_us": to_micros(metadata.registered_at),
        "updated_us": change.now_us,
        "state": metadata.state.value,
        "revision": 0,
        "source": metadata.source,
        "description": metadata.description,
        "run_id": metadata.lineage.run_id,
        "step": metadata.lineage.step,
        "checkpoint_id": metadata.lineage.checkpoint_id,
        "run_link": metadata.lineage.run_link,
        "registered_by": change.actor.name,
        "logged_model_id": metadata.lineage.logged_model_id,
        "experiment_id": metadata.lineage.experiment_id,
        "download_uri": metadata.download_uri,
        "signature": "",
        "signed_by": "",
    }


def _refuse_hidden_break(
    change: Change, metadata: ModelMetadata, tensors: Mapping[str, TensorSpec]
) -> None:
    """A version must be new, and must not break users of its neighbour with the same major version."""
    neighbour = _neighbour(change, metadata.version)
    if neighbour is None or neighbour["major"] != metadata.version.major:
        return
    if version_of(neighbour) == metadata.version:
        raise AlreadyExistsError(
            f"the model {metadata.model_id!r} has a version {metadata.version} already "
            f"(number {neighbour['number']}, {neighbour['state']}, "
            f"checksum {neighbour['checksum']!r}); register the change under a new version"
        )
    due = due_bump(_interface_of(neighbour), _interface(metadata, tensors))
    if due.bump is Bump.MAJOR:
        raise ConflictError(
            f"{metadata.model_id} {metadata.version} would break users of {version_of(neighbour)}: "
            f"{'; '.join(due.reasons)}. A breaking change needs a new major version"
        )


_PARTS = sa.tuple_(
    *(sa.bindparam(part, type_=sa.BigInteger) for part in ("major", "minor", "patch"))
)
_DESCENDING = [column.desc() for column in VERSION_ORDER.clauses]
_WITH_TENSORS = sa.select(VERSIONS, TENSORS.c.tensors).outerjoin_from(VERSIONS, TENSORS)
_OF_MODEL = _WITH_TENSORS.where(VERSIONS.c.model_key == sa.bindparam("model_key"))
_LATEST = Prepared(_OF_MODEL.order_by(*_DESCENDING).limit(1))
_NOT_ABOVE = Prepared(_OF_MODEL.where(_PARTS >= VERSION_ORDER).order_by(*_DESCENDING).limit(1))
_ABOVE = Prepared(_OF_MODEL.where(_PARTS < VERSION_ORDER).order_by(*VERSION_ORDER.clauses).limit(1))


def _neighbour(change: Change, version: ModelVersion) -> Row | None:
    """The version itself, or the next lower one of the same major version, or the next higher one."""
    place = {"model_key": change.model["key"], **parts_of(version)}
    lower = _NOT_ABOVE.first(change.connection, place)
    if lower is not None and lower["major"] == version.major:
        return lower
    return _ABOVE.first(change.connection, place)


def _interface_of(row: Row) -> Interface:
    tensors = decode_tensors(row["tensors"])
    return Interface(shape_of(row["input_shape"]), shape_of(row["output_shape"]), tensors)


def _interface(metadata: ModelMetadata, tensors: Mapping[str, TensorSpec]) -> Interface:
    return Interface(metadata.input_shape, metadata.output_shape, tensors)


def _next_version(
    change: Change, metadata: ModelMetadata, tensors: Mapping[str, TensorSpec], least: Bump
) -> tuple[ModelVersion, DueBump]:
    latest = _LATEST.first(change.connection, {"model_key": change.model["key"]})
    if latest is None:
        return FIRST_VERSION, DueBump(least, ("the model has no version yet",))
    due = due_bump(_interface_of(latest), _interface(metadata, tensors))
    bump = max(due.bump, least, key=_BUMPS.index)
    return version_of(latest).next(bump), due
