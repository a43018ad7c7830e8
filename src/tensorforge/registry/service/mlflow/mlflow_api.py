"""The operations that MLflow clients use, under `/api/2.0/mlflow/`.

MLflow's model `name` is the registry's `model_id`, and its integer `version` is the registry's `number`. Each
MLflow stage stands for one or two states; a stage that is written like a version range (`models:/ranker/^1.2`)
is read as one. Every version shows its version and state as the tags `tensorforge.version` and
`tensorforge.state`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tensorforge.errors import (
    InvalidInputError,
    NotFoundError,
    TransitionError,
)
from tensorforge.registry.database.writes.transitions import FORCE, TransitionRequest
from tensorforge.registry.domain.deployment_lifecycle import (
    DEPLOYMENT_LIFECYCLE,
    DeploymentState,
    needs_evidence,
)
from tensorforge.registry.domain.models import ModelMetadata
from tensorforge.registry.domain.names import check_name
from tensorforge.registry.domain.version_ranges import is_range
from tensorforge.registry.domain.versions import Bump, require_version
from tensorforge.registry.service.context import ServiceContext
from tensorforge.registry.service.endpoints import (
    Endpoints,
    measured,
    read_limited,
)
from tensorforge.registry.service.error_responses import json_response
from tensorforge.registry.service.mlflow.mlflow_documents import VERSION_DOCUMENT
from tensorforge.registry.service.mlflow.mlflow_wire import (
    PREFIX,
    STAGES,
    Aliased,
    CreateModel,
    CreateVersion,
    Described,
    DropTag,
    LatestVersions,
    MlflowRequest,
    Named,
    NamedAlias,
    NamedVersion,
    RenameModel,
    Search,
    SetTag,
    TransitionStage,
    VersionDescribed,
    VersionDropTag,
    VersionSetTag,
    model_body,
    new_version,
    plain_tags,
    refuse_reserved,
    stage_of,
    version_body,
)
from tensorforge.registry.service.operations import (
    Call,
    may_change,
    read_body,
    read_query,
    require_scope,
)
from tensorforge.registry.tokens import Scope

_DEFAULT_MODELS = 100
_DEFAULT_VERSIONS = 10_000

Json = dict[str, Any]


def _find(call: Call, name: str, version: str) -> ModelMetadata:
    check_name("name", name)
    if not (version.isascii() and version.isdigit() and len(version) <= 18):
        metadata = call.registry.get(name, require_version(version))
    else:
        metadata = call.registry.get_by_number(name, int(version))
    if metadata is None:
        raise NotFoundError(f"Model Version (name={name}, version={version}) not found")
    return metadata


def _model(call: Call, name: str) -> Json:
    model = call.registry.get_model(check_name("name", name))
    numbers = {
        alias: metadata.number
        for alias, version in model.aliases.items()
        if (metadata := call.registry.get(name, version)) is not None
    }
    return {"registered_model": model_body(model, _latest(call, name), numbers)}


def _latest(call: Call, name: str) -> list[ModelMetadata]:
    found = (_latest_in(call, name, stage) for stage in STAGES)
    return [metadata for metadata in found if metadata is not None]


def _latest_in(call: Call, name: str, stage: str) -> ModelMetadata | None:
    if stage == "Production":
        return call.registry.production(name)
    return call.registry.latest_in_state(name, STAGES[stage])


def create_model(call: Call) -> Json:
    """`registered-models/create`."""
    body: CreateModel = call.body
    name = check_name("name", body.name)
    tags = plain_tags(body.tags)
    made = call.registry.create_model(
        name, description=body.description or "", tags=tags, actor=call.actor
    )
    return {"registered_model": model_body(made, [], {})}


def get_model(call: Call) -> Json:
    """`registered-models/get`."""
    return _model(call, call.body.name)


def rename_model(call: Call) -> Json:
    """`registered-models/rename`."""
    call.registry.rename_model(call.body.name, call.body.new_name, actor=call.actor)
    return _model(call, call.body.new_name)


def update_model(call: Call) -> Json:
    """`registered-models/update`."""
    call.registry.describe_model(call.body.name, call.body.description or "", actor=call.actor)
    return _model(call, call.body.name)


def delete_model(call: Call) -> Json:
    """`registered-models/delete`."""
    call.registry.delete_model(call.body.name, actor=call.actor)
    return {}


def search_models(call: Call) -> Json:
    """`registered-models/search`."""
    body: Search = call.body
    page = call.registry.search_models(
        body.filter, **body.options(default=_DEFAULT_MODELS, most=1_000)
    )
    found = [_model(call, model.model_id)["registered_model"] for model in page.items]
    return _page("registered_models", found, page.next_token)


def set_model_tag(call: Call) -> Json:
    """`registered-models/set-tag`."""
    body: SetTag = call.body
    call.registry.set_tags(body.name, put={body.key: body.value}, actor=call.actor)
    return {}


def delete_model_tag(call: Call) -> Json:
    """`registered-models/delete-tag`."""
    call.registry.set_tags(call.body.name, drop=[call.body.key], actor=call.actor)
    return {}


def latest_versions(call: Call) -> Json:
    """`registered-models/get-latest-versions`: the highest version in each stage or range."""
    body: LatestVersions = call.body
    name = check_name("name", body.name)
    call.registry.get_model(name)
    if not body.stages:
        return {"model_versions": [version_body(each) for each in _latest(call, name)]}
    found = [_stage_or_range(call, name, stage) for stage in body.stages]
    return {"model_versions": [version_body(each) for each in found if each is not None]}


def _stage_or_range(call: Call, name: str, text: str) -> ModelMetadata | None:
    stage = stage_of(text)
    if stage is not None:
        return _latest_in(call, name, stage)
    if not is_range(text):
        known = ", ".join(STAGES)
        raise InvalidInputError(
            f"Invalid Model Version stage: {text[:60]!r}. Use one of {known}, or a range like ^1.2"
        )
    return call.registry.resolve(name, text)


def set_alias(call: Call) -> Json:
    """`registered-models/alias`, POST."""
    body: Aliased = call.body
    metadata = _find(call, body.name, body.version)
    call.registry.set_alias(body.name, body.alias, metadata.version, actor=call.actor)
    return {}


def get_alias(call: Call) -> Json:
    """`registered-models/alias`, GET."""
    metadata = call.registry.get_by_alias(call.body.name, call.body.alias)
    return {"model_version": version_body(metadata)}


def delete_alias(call: Call) -> Json:
    """`registered-models/alias`, DELETE."""
    call.registry.delete_alias(call.body.name, call.body.alias, actor=call.actor)
    return {}


def create_version(call: Call) -> Json:
    """`model-versions/create`: the version in the tag `tensorforge.version`, or the next minor version."""
    body: CreateVersion = call.body
    check_name("name", body.name)
    metadata, wanted = new_version(body)
    if wanted is not None:
        stored = call.registry.register(metadata, actor=call.actor, must_exist=True)
    else:
        stored, _ = call.registry.register_next(
            metadata, least=Bump.MINOR, actor=call.actor, must_exist=True
        )
    return {"model_version": version_body(stored)}


def get_version(call: Call) -> Json:
    """`model-versions/get`."""
    return {"model_version": version_body(_find(call, call.body.name, call.body.version))}


def download_uri(call: Call) -> Json:
    """`model-versions/get-download-uri`: the source as it was registered."""
    return {"artifact_uri": _find(call, call.body.name, call.body.version).source}


def update_version(call: Call) -> Json:
    """`model-versions/update`."""
    metadata = _find(call, call.body.name, call.body.version)
    text = call.body.description or ""
    changed = call.registry.describe_version(
        call.body.name, metadata.version, text, actor=call.actor
    )
    return {"model_version": version_body(changed)}


def delete_version(call: Call) -> Json:
    """`model-versions/delete`."""
    metadata = _find(call, call.body.name, call.body.version)
    call.registry.delete_version(call.body.name, metadata.version, actor=call.actor)
    return {}


def search_versions(call: Call) -> Json:
    """`model-versions/search`."""
    body: Search = call.body
    options = body.options(default=_DEFAULT_VERSIONS, most=_DEFAULT_VERSIONS)
    found, token = call.registry.search_version_documents(VERSION_DOCUMENT, body.filter, **options)
    return _page("model_versions", msgspec.Raw(f"[{found}]".encode()), token)


def set_version_tag(call: Call) -> Json:
    """`model-versions/set-tag`."""
    body: VersionSetTag = call.body
    refuse_reserved(body.key)
    metadata = _find(call, body.name, body.version)
    call.registry.set_tags(
        body.name, metadata.version, put={body.key: body.value}, actor=call.actor
    )
    return {}


def delete_version_tag(call: Call) -> Json:
    """`model-versions/delete-tag`."""
    refuse_reserved(call.body.key)
    metadata = _find(call, call.body.name, call.body.version)
    call.registry.set_tags(call.body.name, metadata.version, drop=[call.body.key], actor=call.actor)
    return {}


def transition(call: Call) -> Json:
    """`model-versions/transition-stage`: the shortest path to the stage, in one transaction.

    A transition that needs evidence and has none is refused, unless the token has the scope `registry:force`.
    The audit then shows that the transition was forced.
    """
    body: TransitionStage = call.body
    stage = stage_of(body.stage)
    if stage is None:
        raise InvalidInputError(
            f"Invalid Model Version stage: {body.stage[:60]!r}. Use one of {', '.join(STAGES)}"
        )
    metadata = _find(call, body.name, body.version)
    if metadata.state not in STAGES[stage]:
        metadata = _enter_stage(call, metadata, stage, archive=body.archive_existing_versions)
    return {"model_version": version_body(metadata)}


_TARGETS = {
    "None": DeploymentState.REGISTERED,
    "Staging": DeploymentState.STAGING,
    "Production": DeploymentState.PRODUCTION,
    "Archived": DeploymentState.ARCHIVED,
}


def _enter_stage(
    call: Call, metadata: ModelMetadata, stage: str, *, archive: bool
) -> ModelMetadata:
    target = _TARGETS[stage]
    path = DEPLOYMENT_LIFECYCLE.shortest_path(metadata.state, target)
    # A version that is to be archived must not serve on the way.
    if path is None or DeploymentState.PRODUCTION in path[1:-1]:
        allowed = DEPLOYMENT_LIFECYCLE.allowed(metadata.state)
        raise TransitionError("model version", metadata.state, target, allowed)
    others = _others_in(call, metadata, stage) if archive else []
    gated = any(needs_evidence(a, b) for a, b in itertools.pairwise(path))
    force = gated and FORCE in call.actor.scopes
    entered = _make_transitions(call, metadata, path[1:], force=force)
    for other in others:
        goal = DeploymentState.ARCHIVED if stage == "Production" else DeploymentState.REGISTERED
        down = DEPLOYMENT_LIFECYCLE.shortest_path(other.state, goal)
        _make_transitions(call, other, (down or ())[1:], force=False)
    return entered


def _others_in(call: Call, metadata: ModelMetadata, stage: str) -> list[ModelMetadata]:
    states = ", ".join(f"'{state.value}'" for state in STAGES[stage])
    page = call.registry.search_versions(
        f"state IN ({states})", model_id=metadata.model_id, limit=1_000
    )
    return [other for other in page.items if other.version != metadata.version]


def _make_transitions(
    call: Call, metadata: ModelMetadata, path: tuple[DeploymentState, ...], *, force: bool
) -> ModelMetadata:
    request = TransitionRequest(
        reason="transition-stage by an MLflow client",
        force=force,
        expected_revision=metadata.revision,
    )
    done = call.registry.transition_path(
        metadata.model_id, metadata.version, path, request, actor=call.actor
    )
    return done.metadata


def _page(key: str, items: list[Json] | msgspec.Raw, token: str | None) -> Json:
    return {key: items, "next_page_token": token} if token else {key: items}


@dataclass(frozen=True, slots=True)
class MlflowOperation:
    """An operation of MLflow's API. GET takes query parameters, every other method a JSON body."""

    method: str
    path: str
    scope: Scope
    body: type[MlflowRequest]
    run: Callable[[Call], Json]

    @property
    def name(self) -> str:
        """The operation's name in the metrics."""
        return f"mlflow_{self.run.__name__}"


_M, _V = "registered-models/", "model-versions/"
OPERATIONS = (
    MlflowOperation("POST", f"{_M}create", Scope.WRITE, CreateModel, create_model),
    MlflowOperation("GET", f"{_M}get", Scope.READ, Named, get_model),
    MlflowOperation("POST", f"{_M}rename", Scope.ADMIN, RenameModel, rename_model),
    MlflowOperation("PATCH", f"{_M}update", Scope.WRITE, Described, update_model),
    MlflowOperation("DELETE", f"{_M}delete", Scope.ADMIN, Named, delete_model),
    MlflowOperation("GET", f"{_M}search", Scope.READ, Search, search_models),
    MlflowOperation("POST", f"{_M}search", Scope.READ, Search, search_models),
    MlflowOperation("POST", f"{_M}set-tag", Scope.WRITE, SetTag, set_model_tag),
    MlflowOperation("DELETE", f"{_M}delete-tag", Scope.WRITE, DropTag, delete_model_tag),
    MlflowOperation(
        "POST", f"{_M}get-latest-versions", Scope.READ, LatestVersions, latest_versions
    ),
    MlflowOperation("GET", f"{_M}get-latest-versions", Scope.READ, LatestVersions, latest_versions),
    MlflowOperation("POST", f"{_M}alias", Scope.WRITE, Aliased, set_alias),
    MlflowOperation("GET", f"{_M}alias", Scope.READ, NamedAlias, get_alias),
    MlflowOperation("DELETE", f"{_M}alias", Scope.WRITE, NamedAlias, delete_alias),
    MlflowOperation("POST", f"{_V}create", Scope.WRITE, CreateVersion, create_version),
    MlflowOperation("GET", f"{_V}get", Scope.READ, NamedVersion, get_version),
    MlflowOperation("GET", f"{_V}get-download-uri", Scope.READ, NamedVersion, download_uri),
    MlflowOperation("PATCH", f"{_V}update", Scope.WRITE, VersionDescribed, update_version),
    MlflowOperation("DELETE", f"{_V}delete", Scope.ADMIN, NamedVersion, delete_version),
    MlflowOperation("GET", f"{_V}search", Scope.READ, Search, search_versions),
    MlflowOperation("POST", f"{_V}transition-stage", Scope.TRANSITION, TransitionStage, transition),
    MlflowOperation("POST", f"{_V}set-tag", Scope.WRITE, VersionSetTag, set_version_tag),
    MlflowOperation("DELETE", f"{_V}delete-tag", Scope.WRITE, VersionDropTag, delete_version_tag),
)

_QUICK = frozenset({get_model, get_version, get_alias, download_uri, latest_versions})


def endpoints(context: ServiceContext) -> Endpoints:
    """The endpoints of MLflow's operations."""
    return {
        (each.method, PREFIX + each.path): measured(
            context, each.name, functools.partial(_perform, context, each)
        )
        for each in OPERATIONS
    }


async def _perform(
    context: ServiceContext, operation: MlflowOperation, request: HttpRequest
) -> Response:
    principal = request.scope["tensorforge.principal"]
    require_scope(operation.scope, principal)
    if operation.method == "GET":
        body = read_query(operation.body, _query_parameters(request, operation.body))
    else:
        body = read_body(operation.body, await read_limited(request, context.limits))
    call = context.call(request, principal, body=body)
    changes = may_change(operation.method, operation.scope)
    return await context.run(_run, operation, call, quick=operation.run in _QUICK, changes=changes)


def _run(operation: MlflowOperation, call: Call) -> Response:
    return json_response(200, operation.run(call))


def _query_parameters(request: HttpRequest, kind: type[MlflowRequest]) -> Json:
    pairs = parse_qsl(request.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    lists = {"order_by", "stages"} & set(kind.__struct_fields__)
    return dict(pairs) | {key: [value for name, value in pairs if name == key] for key in lists}
