"""The operations that MLflow clients use, under `/api/2.0/mlflow/`.

MLflow's model `name` is the registry's `model_id`, and its integer `version` is the registry's `number`. Each
MLflow stage stands for one or two states; a stage that is written like a version range (`models:/ranker/^1.2`)
is read as one. Every version shows its version and state as the tags `tensorforge.version` and
`tensorforge.state`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tensorforge.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidInputError,
    NotFoundError,
)
from tensorforge.registry.artifacts import version_folder
from tensorforge.registry.database.reads.overviews import ModelOverview
from tensorforge.registry.database.writes.stage_moves import StageRequest
from tensorforge.registry.domain.mlflow_stages import STAGES, stage_of
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
from tensorforge.registry.service.mlflow import webhooks_api
from tensorforge.registry.service.mlflow.mlflow_documents import VERSION_DOCUMENT
from tensorforge.registry.service.mlflow.mlflow_wire import (
    MODEL_ORDER,
    PREFIX,
    VERSION_ORDER,
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
    is_copy,
    model_body,
    new_version,
    plain_tags,
    refuse_reserved,
    version_body,
)
from tensorforge.registry.service.operations import (
    Call,
    may_change,
    read_body,
    read_query,
    require_scope,
)
from tensorforge.registry.sources import ResolvedSource
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
    return {"registered_model": model_body(call.registry.overview(check_name("name", name)))}


def create_model(call: Call) -> Json:
    """`registered-models/create`."""
    body: CreateModel = call.body
    name = check_name("name", body.name)
    tags = plain_tags(body.tags)
    try:
        made = call.registry.create_model(
            name, description=body.description or "", tags=tags, actor=call.actor
        )
    except AlreadyExistsError as error:
        raise AlreadyExistsError(f"Registered Model (name={name}) already exists.") from error
    return {"registered_model": model_body(ModelOverview(made, (), {}))}


def get_model(call: Call) -> Json:
    """`registered-models/get`."""
    return _model(call, call.body.name)


def rename_model(call: Call) -> Json:
    """`registered-models/rename`."""
    body: RenameModel = call.body
    require_scope(Scope.ADMIN, call.principal, body.new_name)
    try:
        call.registry.rename_model(body.name, body.new_name, actor=call.actor)
    except AlreadyExistsError as error:
        message = f"Registered Model (name={body.new_name}) already exists."
        raise AlreadyExistsError(message) from error
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
    options = body.options(default=_DEFAULT_MODELS, most=1_000, order=MODEL_ORDER)
    page = call.registry.search_overviews(body.filter, **options)
    found = [model_body(each) for each in page.items]
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
    latest = call.registry.overview(name).latest
    if not body.stages:
        return {"model_versions": [version_body(each) for each in latest]}
    found = [_stage_or_range(call, name, stage, latest) for stage in body.stages]
    return {"model_versions": [version_body(each) for each in found if each is not None]}


def _stage_or_range(
    call: Call, name: str, text: str, latest: Sequence[ModelMetadata]
) -> ModelMetadata | None:
    stage = stage_of(text)
    if stage is not None:
        return next((each for each in latest if each.state in STAGES[stage]), None)
    if not is_range(text):
        known = ", ".join(STAGES)
        raise InvalidInputError(
            f"Invalid Model Version stage: {text[:60]!r}. Use one of {known}, or a range like ^1.2"
        )
    return call.registry.resolve(name, text)


def set_alias(call: Call) -> Json:
    """`registered-models/alias`, POST."""
    body: Aliased = call.body
    rule = call.alias_rule(body.alias)
    metadata = _find(call, body.name, body.version)
    call.registry.set_alias(body.name, body.alias, metadata.version, actor=call.actor, **rule)
    return {}


def get_alias(call: Call) -> Json:
    """`registered-models/alias`, GET."""
    body: NamedAlias = call.body
    if body.alias.lower() == "latest":
        newest = call.registry.newest(body.name)
        if newest is not None:
            return {"model_version": version_body(newest)}
    try:
        metadata = call.registry.get_by_alias(body.name, body.alias)
    except NotFoundError as error:
        _require_model(call, body.name)
        raise InvalidInputError(f"Registered model alias {body.alias} not found.") from error
    return {"model_version": version_body(metadata)}


def delete_alias(call: Call) -> Json:
    """`registered-models/alias`, DELETE: deleting an alias that does not exist changes nothing."""
    body: NamedAlias = call.body
    call.alias_rule(body.alias)
    try:
        call.registry.delete_alias(body.name, body.alias, actor=call.actor)
    except NotFoundError:
        _require_model(call, body.name)
    return {}


def _require_model(call: Call, name: str) -> None:
    call.registry.get_model(name)


def resolve_source(call: Call) -> ResolvedSource:
    """Where the files of a new version lie, and where they came from, as far as this can be found out."""
    body: CreateVersion = call.body
    copied = _COPIED.fullmatch(body.source)
    if copied is not None:
        origin = call.registry.get_by_number(copied[1], int(copied[2]))
        if origin is not None:
            return ResolvedSource(
                uri=origin.download_uri or origin.source,
                run_id=origin.lineage.run_id,
                logged_model_id=origin.lineage.logged_model_id,
                experiment_id=origin.lineage.experiment_id,
            )
    if call.options.sources is None:
        return ResolvedSource()
    return call.options.sources.resolve(body.source, body.model_id or "")


_COPIED = re.compile(r"models:/([^/@]+)/(\d{1,18})")


def create_version(call: Call) -> Json:
    """`model-versions/create`: the version in the tag `tensorforge.version`, or the next minor version.

    A copy of a version gets the version of its original if the model does not have that yet.
    """
    body: CreateVersion = call.body
    check_name("name", body.name)
    metadata, wanted = new_version(body, call.prepared or ResolvedSource())
    if wanted is not None:
        try:
            stored = call.registry.register(metadata, actor=call.actor, must_exist=True)
        except ConflictError:
            if not is_copy(body):
                raise
            wanted = None
    if wanted is None:
        stored, _ = call.registry.register_next(
            metadata, least=Bump.MINOR, actor=call.actor, must_exist=True
        )
    return {"model_version": version_body(stored)}


def get_version(call: Call) -> Json:
    """`model-versions/get`."""
    return {"model_version": version_body(_find(call, call.body.name, call.body.version))}


def download_uri(call: Call) -> Json:
    """`model-versions/get-download-uri`: where the files lie, or the source as it was registered."""
    metadata = _find(call, call.body.name, call.body.version)
    artifacts = call.options.artifacts
    folder = version_folder(metadata.model_id, metadata.number)
    if artifacts is not None and artifacts.has_files(folder):
        return {"artifact_uri": f"mlflow-artifacts:/{folder}"}
    return {"artifact_uri": metadata.download_uri or metadata.source}


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
    options = body.options(default=_DEFAULT_VERSIONS, most=200_000, order=VERSION_ORDER)
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
    """`model-versions/transition-stage`: the way into the stage, and all that it causes, in one transaction.

    A transition that needs evidence and has none is refused, unless the token has the scope `registry:force`.
    The audit then shows that the transition was forced.
    """
    body: TransitionStage = call.body
    stage = stage_of(body.stage)
    if stage is None:
        raise InvalidInputError(
            f"Invalid Model Version stage: {body.stage[:60]!r}. Use one of {', '.join(STAGES)}"
        )
    if body.archive_existing_versions and stage not in ("Staging", "Production"):
        raise InvalidInputError(
            f"Model version transition cannot archive existing model versions because {stage!r} is not an "
            "Active stage. Valid stages are Staging, Production"
        )
    metadata = _find(call, body.name, body.version)
    request = StageRequest(
        stage=stage,
        archive_existing=body.archive_existing_versions,
        moves=call.options.stage_moves,
    )
    entered = call.registry.enter_stage(body.name, metadata.version, request, actor=call.actor)
    return {"model_version": version_body(entered)}


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
    prepare: Callable[[Call], Any] | None = None
    """Work that may wait for another server; it is done before the change begins."""
    writes: bool = True
    """Whether the operation writes to the database, if its method and scope allow that."""

    @property
    def name(self) -> str:
        """The operation's name in the metrics."""
        return f"mlflow_{self.run.__name__}"


_M, _V, _W, _ONE = "registered-models/", "model-versions/", "webhooks", "webhooks/{webhook_id}"
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
    MlflowOperation(
        "POST", f"{_V}create", Scope.WRITE, CreateVersion, create_version, resolve_source
    ),
    MlflowOperation("GET", f"{_V}get", Scope.READ, NamedVersion, get_version),
    MlflowOperation("GET", f"{_V}get-download-uri", Scope.READ, NamedVersion, download_uri),
    MlflowOperation("PATCH", f"{_V}update", Scope.WRITE, VersionDescribed, update_version),
    MlflowOperation("DELETE", f"{_V}delete", Scope.ADMIN, NamedVersion, delete_version),
    MlflowOperation("GET", f"{_V}search", Scope.READ, Search, search_versions),
    MlflowOperation("POST", f"{_V}transition-stage", Scope.TRANSITION, TransitionStage, transition),
    MlflowOperation("POST", f"{_V}set-tag", Scope.WRITE, VersionSetTag, set_version_tag),
    MlflowOperation("DELETE", f"{_V}delete-tag", Scope.WRITE, VersionDropTag, delete_version_tag),
    MlflowOperation(
        "POST", _W, Scope.ADMIN, webhooks_api.WebhookFields, webhooks_api.create_webhook
    ),
    MlflowOperation("GET", _W, Scope.ADMIN, webhooks_api.ListWebhooks, webhooks_api.list_webhooks),
    MlflowOperation("GET", _ONE, Scope.ADMIN, webhooks_api.OneWebhook, webhooks_api.get_webhook),
    MlflowOperation(
        "PATCH", _ONE, Scope.ADMIN, webhooks_api.WebhookFields, webhooks_api.update_webhook
    ),
    MlflowOperation(
        "DELETE", _ONE, Scope.ADMIN, webhooks_api.OneWebhook, webhooks_api.delete_webhook
    ),
    MlflowOperation(
        "POST",
        f"{_ONE}/test",
        Scope.ADMIN,
        webhooks_api.TryWebhook,
        webhooks_api.try_webhook,
        writes=False,
    ),
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
    if operation.method == "GET":
        body = read_query(operation.body, _query_parameters(request, operation.body))
    else:
        body = read_body(operation.body, await read_limited(request, context.limits) or b"{}")
    name = getattr(body, "name", None) if isinstance(body, Named) else None
    require_scope(operation.scope, principal, name)
    call = context.call(request, principal, body=body)
    if operation.prepare is not None:
        call = replace(call, prepared=await context.run(operation.prepare, call))
    changes = may_change(operation.method, operation.scope) and operation.writes
    return await context.run(_run, operation, call, quick=operation.run in _QUICK, changes=changes)


def _run(operation: MlflowOperation, call: Call) -> Response:
    try:
        return json_response(200, operation.run(call))
    except NotFoundError as error:
        raise _in_mlflows_words(call, error) from error


def _in_mlflows_words(call: Call, error: NotFoundError) -> NotFoundError:
    """The same error with the text that MLflow's clients look for."""
    name, version = getattr(call.body, "name", None), getattr(call.body, "version", None)
    if not isinstance(call.body, Named) or name is None:
        return error
    try:
        call.registry.get_model(name)
    except NotFoundError:
        if version is None or isinstance(call.body, Aliased):
            return NotFoundError(f"Registered Model with name={name} not found")
    if version is not None:
        return NotFoundError(f"Model Version (name={name}, version={version}) not found")
    return error


def _query_parameters(request: HttpRequest, kind: type[MlflowRequest]) -> Json:
    pairs = parse_qsl(request.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    lists = {"order_by", "stages"} & set(kind.__struct_fields__)
    return dict(pairs) | {key: [value for name, value in pairs if name == key] for key in lists}
