"""MLflow's requests and answers, and the states that its stages stand for."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tensorforge.errors import AlreadyExistsError, InvalidInputError
from tensorforge.registry.database.reads.overviews import ModelOverview
from tensorforge.registry.database.times import to_micros
from tensorforge.registry.domain.mlflow_stages import STAGES
from tensorforge.registry.domain.models import Lineage, ModelMetadata
from tensorforge.registry.domain.versions import ModelVersion, require_version
from tensorforge.registry.service.shared_wire import ErrorAnswer
from tensorforge.registry.sources import ResolvedSource

PREFIX = "/api/2.0/mlflow/"

VERSION_TAG = "tensorforge.version"
STATE_TAG = "tensorforge.state"
RESERVED_TAGS = frozenset({VERSION_TAG, STATE_TAG})

_BY_STATE = {state.value: stage for stage, states in STAGES.items() for state in states}

_ERROR_CODES = {
    400: "INVALID_PARAMETER_VALUE",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "RESOURCE_DOES_NOT_EXIST",
    409: "RESOURCE_CONFLICT",
    412: "ABORTED",
    413: "INVALID_PARAMETER_VALUE",
    414: "INVALID_PARAMETER_VALUE",
    415: "INVALID_PARAMETER_VALUE",
    429: "REQUEST_LIMIT_EXCEEDED",
    503: "TEMPORARILY_UNAVAILABLE",
}


class MlflowRequest(msgspec.Struct, kw_only=True):
    """A request of an MLflow client; unknown fields, which newer clients may send, are ignored."""


class Tag(msgspec.Struct):
    """A tag as MLflow writes it."""

    key: str
    value: str = ""


class Named(MlflowRequest):
    """A model."""

    name: str


class CreateModel(Named):
    """A new model."""

    tags: list[Tag] = []
    description: str | None = None


class RenameModel(Named):
    """A model and its new name."""

    new_name: str


class Described(Named):
    """A model and its new description."""

    description: str | None = None


class DropTag(Named):
    """The key of a model's tag."""

    key: str


class SetTag(DropTag):
    """A model's tag."""

    value: str = ""


class NamedAlias(Named):
    """A model's alias."""

    alias: str


class Aliased(NamedAlias):
    """An alias and the version that it will point at."""

    version: str


class LatestVersions(Named):
    """A model, and the stages or ranges to look in."""

    stages: Annotated[list[str], Meta(max_length=20)] = []


class NamedVersion(Named):
    """A version of a model."""

    version: str


class VersionDescribed(NamedVersion):
    """A version and its new description."""

    description: str | None = None


class VersionDropTag(NamedVersion):
    """The key of a version's tag."""

    key: str


class VersionSetTag(VersionDropTag):
    """A version's tag."""

    value: str = ""


class TransitionStage(NamedVersion):
    """A version and the stage that it will enter."""

    stage: str
    archive_existing_versions: bool = False


class CreateVersion(Named):
    """A new version."""

    source: str = ""
    run_id: str | None = None
    run_link: str | None = None
    description: str | None = None
    tags: list[Tag] = []
    model_id: str | None = None


class Search(MlflowRequest):
    """A search, page by page."""

    filter: str = ""
    max_results: int | None = None
    order_by: list[str] = []
    page_token: str | None = None

    def options(self, *, default: int, most: int, order: tuple[str, ...]) -> dict[str, Any]:
        """The arguments of the registry's search methods.

        `order` sorts what `order_by` leaves undecided, each field as `name ASC`.
        """
        wanted = default if self.max_results is None else self.max_results
        if not 1 <= wanted <= most:
            raise InvalidInputError(
                f"Invalid value {wanted} for parameter 'max_results' supplied: It must be a positive "
                f"integer of at most {most}"
            )
        clauses = [clause for clause in self.order_by if clause]
        named = {clause.split()[0].strip('`"').lower() for clause in clauses if clause.split()}
        rest = order if clauses else (_NEWEST_FIRST, *order)
        if order == MODEL_ORDER and not clauses:
            rest = order
        clauses += [clause for clause in rest if clause.split()[0] not in named]
        return {
            "limit": min(wanted, _LARGEST_PAGE),
            "order_by": clauses,
            "token": self.page_token or None,
        }


_NEWEST_FIRST = "last_updated_timestamp DESC"
_LARGEST_PAGE = 10_000
MODEL_ORDER = ("name ASC",)
VERSION_ORDER = ("name ASC", "version_number DESC")


def plain_tags(tags: list[Tag]) -> dict[str, str]:
    """MLflow's list of tags as a mapping; if a key occurs twice, the last value counts."""
    return {tag.key: tag.value for tag in tags}


def refuse_reserved(key: str) -> None:
    """`InvalidInputError` if the registry itself sets the tag."""
    if key in RESERVED_TAGS:
        raise InvalidInputError(f"the tag {key} is set by the registry and cannot be changed")


def is_copy(body: CreateVersion) -> bool:
    """Whether a client copies another version: only then does it send the tag that tells a state."""
    return any(tag.key == STATE_TAG for tag in body.tags)


def new_version(
    body: CreateVersion, found: ResolvedSource
) -> tuple[ModelMetadata, ModelVersion | None]:
    """The metadata of a new version, and the version in its tags, if they have one."""
    tags = plain_tags(body.tags)
    asked = tags.pop(VERSION_TAG, None)
    tags.pop(STATE_TAG, None)
    wanted = None if asked is None else require_version(asked)
    metadata = ModelMetadata(
        model_id=body.name,
        name=body.name,
        version=wanted or ModelVersion(0, 0, 0),
        framework="mlflow",
        input_shape=(),
        output_shape=(),
        size_bytes=0,
        checksum="",
        registered_at=datetime.now(UTC),
        tags=tags,
        source=body.source,
        description=body.description or "",
        lineage=Lineage(
            run_id=body.run_id or found.run_id,
            run_link=body.run_link or "",
            logged_model_id=body.model_id or found.logged_model_id,
            experiment_id=found.experiment_id,
        ),
        download_uri=found.uri,
    )
    return metadata, wanted


def error_body(status: int, error: Exception, answer: ErrorAnswer) -> dict[str, Any]:
    """The body of an error in MLflow's format."""
    code = _ERROR_CODES.get(status, "INTERNAL_ERROR")
    if isinstance(error, AlreadyExistsError):
        code = "RESOURCE_ALREADY_EXISTS"
    return {"error_code": code, "message": answer.message}


def version_body(metadata: ModelMetadata) -> dict[str, Any]:
    """A version in MLflow's format."""
    state = metadata.state.value
    return {
        "name": metadata.model_id,
        "version": str(metadata.number),
        "creation_timestamp": _millis(metadata.registered_at),
        "last_updated_timestamp": _millis(metadata.updated_at or metadata.registered_at),
        "user_id": metadata.registered_by,
        "current_stage": _BY_STATE[state],
        "description": metadata.description,
        "source": metadata.source,
        "run_id": metadata.lineage.run_id,
        "run_link": metadata.lineage.run_link,
        "model_id": metadata.lineage.logged_model_id,
        "status": "READY",
        "tags": _tags({**metadata.tags, VERSION_TAG: str(metadata.version), STATE_TAG: state}),
        "aliases": metadata.aliases,
    }


def model_body(found: ModelOverview) -> dict[str, Any]:
    """A model in MLflow's format."""
    model = found.model
    return {
        "name": model.model_id,
        "creation_timestamp": _millis(model.created_at),
        "last_updated_timestamp": _millis(model.updated_at),
        "description": model.description,
        "latest_versions": [version_body(metadata) for metadata in found.latest],
        "tags": _tags(model.tags),
        "aliases": [{"alias": a, "version": str(n)} for a, n in found.alias_numbers.items()],
    }


def _tags(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in tags.items()]


def _millis(moment: datetime) -> int:
    return to_micros(moment) // 1_000
