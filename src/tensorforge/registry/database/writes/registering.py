"""New versions: checked, numbered, compared with their neighbours, written with their audit row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from tensorforge.errors import AlreadyExistsError, ConflictError, InvalidInputError
from tensorforge.registry.database.audit import AuditFact
from tensorforge.registry.database.rows import (
    VERSION_ORDER,
    decode_tensors,
    encode_tensors,
    find_model,
    insertion_if_absent,
    look_for_model,
    parts_of,
    shape_of,
    version_of,
)
from tensorforge.registry.database.tables import MODELS, TENSORS, VERSION_TAGS, VERSIONS
from tensorforge.registry.database.times import from_micros, to_micros
from tensorforge.registry.database.writes import changes
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
    """The metadata with every field checked; `InvalidInputError` names the first that is wrong."""
    if metadata.state is not DeploymentState.REGISTERED:
        raise InvalidInputError(
            f"state = {metadata.state}: a new version begins as registered and moves on from there"
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
    )


def check_shape(field: str, shape: object) -> Shape:
    """A shape: at most 64 whole numbers, none negative."""
    if not isinstance(shape, (tuple, list)) or len(shape) > _MAX_AXES:
        raise InvalidInputError(f"{field} must be a list of at most {_MAX_AXES} whole numbers")
    return tuple(check_whole(f"{field}[{axis}]", size) for axis, size in enumerate(shape))


def check_whole(field: str, value: object) -> int:
    """A whole number that both databases can store."""
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
    )


_MODEL_COLUMNS = [column.name for column in MODELS.columns if column.name != "key"]
_ADD_MODEL = insertion_if_absent(MODELS, _MODEL_COLUMNS)
_NEW_MODEL = dict.fromkeys(_MODEL_COLUMNS) | {"last_number": 0, "version_count": 0}


def model_for_writing(
    connection: sa.Connection, model_id: str, actor: Actor, now_us: int, *, must_exist: bool
) -> Row:
    """The model's row, locked; made first if there is none, unless it must exist already."""
    if must_exist:
        return find_model(connection, model_id, lock=True)
    row = look_for_model(connection, model_id, lock=True)
    return row or create_model(connection, model_id, actor, now_us, exist_ok=True)


def create_model(
    connection: sa.Connection,
    model_id: str,
    actor: Actor,
    now_us: int,
    *,
    description: str = "",
    exist_ok: bool = False,
) -> Row:
    """Make a model without versions and return its row, locked."""
    values = {"model_id": model_id, "description": description}
    times = {"created_us": now_us, "updated_us": now_us}
    created = _ADD_MODEL.first(connection, _NEW_MODEL | values | times)
    if created is None:
        if not exist_ok:
            raise AlreadyExistsError(f"there is a model called {model_id!r} already")
        return find_model(connection, model_id, lock=True)
    fact = AuditFact(
        actor=actor.name, action="create_model", model_key=created["key"], model_id=model_id
    )
    changes.record(connection, fact, now_us)
    return created


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


def insert_version(
    connection: sa.Connection,
    model: Row,
    metadata: ModelMetadata,
    tensors: Mapping[str, TensorSpec],
    actor: Actor,
    now_us: int,
    *,
    is_next: bool = False,
) -> ModelMetadata:
    """Write a checked version of a locked model and return it as it was stored.

    `AlreadyExistsError` if the version is taken. `is_next` says that `next_version` chose it in this
    transaction, so that it is known to be new and to break nobody.
    """
    if not is_next:
        _refuse_hidden_break(connection, model, metadata, tensors)
    number = model["last_number"] + 1
    values = _values(model, metadata, number, actor, now_us)
    version_key = _ADD_VERSION.all(connection, values)[0]["key"]
    if metadata.tags:
        insert_tags(connection, VERSION_TAGS, "version_key", version_key, metadata.tags)
    if tensors:
        declared = {"version_key": version_key, "tensors": encode_tensors(tensors)}
        _ADD_TENSORS.run(connection, declared)
    counted = {"of_model": model["key"], "number": number, "now_us": now_us}
    _COUNT_VERSION.run(connection, counted)
    fact = AuditFact(
        actor=actor.name,
        action="register",
        model_key=model["key"],
        model_id=metadata.model_id,
        version=str(metadata.version),
        to_state=DeploymentState.REGISTERED.value,
        evidence={"checksum": metadata.checksum, "number": number},
    )
    changes.record(connection, fact, now_us)
    return replace(
        metadata,
        tags=dict(sorted(metadata.tags.items())),
        registered_by=actor.name,
        updated_at=from_micros(now_us),
        number=number,
        revision=0,
        aliases=(),
    )


def _values(
    model: Row, metadata: ModelMetadata, number: int, actor: Actor, now_us: int
) -> dict[str, Any]:
    return {
        "model_key": model["key"],
        "number": number,
        "major": metadata.version.major,
        "minor": metadata.version.minor,
        "patch": metadata.version.patch,
        "name": metadata.name,
        "framework": metadata.framework,
        "input_shape": json.dumps(metadata.input_shape),
        "output_shape": json.dumps(metadata.output_shape),
        "size_bytes": metadata.size_bytes,
        "checksum": metadata.checksum,
        "registered_us": to_micros(metadata.registered_at),
        "updated_us": now_us,
        "state": metadata.state.value,
        "revision": 0,
        "source": metadata.source,
        "description": metadata.description,
        "run_id": metadata.lineage.run_id,
        "step": metadata.lineage.step,
        "checkpoint_id": metadata.lineage.checkpoint_id,
        "run_link": metadata.lineage.run_link,
        "registered_by": actor.name,
    }


def _refuse_hidden_break(
    connection: sa.Connection,
    model: Row,
    metadata: ModelMetadata,
    tensors: Mapping[str, TensorSpec],
) -> None:
    """A version must be new, and not break those who use its neighbour of the same major version."""
    neighbour = _neighbour(connection, model["key"], metadata.version)
    if neighbour is None or neighbour["major"] != metadata.version.major:
        return
    if version_of(neighbour) == metadata.version:
        raise AlreadyExistsError(
            f"the model {metadata.model_id!r} has a version {metadata.version} already "
            f"(number {neighbour['number']}, {neighbour['state']}, "
            f"checksum {neighbour['checksum']!r}); register the change under a new version"
        )
    due = due_bump(interface_of(neighbour), _interface(metadata, tensors))
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


def _neighbour(connection: sa.Connection, model_key: int, version: ModelVersion) -> Row | None:
    """The version itself, or the next lower one of the same major version, or the next higher one."""
    place = {"model_key": model_key, **parts_of(version)}
    lower = _NOT_ABOVE.first(connection, place)
    if lower is not None and lower["major"] == version.major:
        return lower
    return _ABOVE.first(connection, place)


def interface_of(row: Row) -> Interface:
    """What users of a registered version rely on; the row has its declared `tensors`."""
    tensors = decode_tensors(row["tensors"])
    return Interface(shape_of(row["input_shape"]), shape_of(row["output_shape"]), tensors)


def _interface(metadata: ModelMetadata, tensors: Mapping[str, TensorSpec]) -> Interface:
    return Interface(metadata.input_shape, metadata.output_shape, tensors)


def next_version(
    connection: sa.Connection,
    model_key: int,
    metadata: ModelMetadata,
    tensors: Mapping[str, TensorSpec],
    least: Bump,
) -> tuple[ModelVersion, DueBump]:
    """The version that is due after the highest one, at least `least` away from it."""
    latest = _LATEST.first(connection, {"model_key": model_key})
    if latest is None:
        return FIRST_VERSION, DueBump(least, ("the model has no version yet",))
    due = due_bump(interface_of(latest), _interface(metadata, tensors))
    bump = max(due.bump, least, key=_BUMPS.index)
    return version_of(latest).next(bump), due
