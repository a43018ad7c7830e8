"""Operations on models: create, describe, label, delete, and what served when."""

from __future__ import annotations

import msgspec

from tensorforge.registry.domain.versions import ModelVersion, require_version
from tensorforge.registry.service.operations import Call, Operation, Reply
from tensorforge.registry.service.rest.models_wire import (
    CreateModel,
    HistoryPage,
    HistoryQuery,
    ModelAnswer,
    ModelPage,
    PointAlias,
    ProductionAnswer,
    ProductionQuery,
    RenameModel,
    RollBack,
    RollbackAnswer,
    UpdateModel,
    audit_answer,
    model_answer,
    sla_of,
)
from tensorforge.registry.service.shared_wire import ChangeTags, SearchQuery
from tensorforge.registry.tokens import Scope

_MODEL = "/api/v1/models/{model_id}"


def _optional_version(text: str | None) -> ModelVersion | None:
    return None if text is None else require_version(text)


def list_models(call: Call) -> Reply:
    """A page of models."""
    page = call.registry.search_models(call.query.filter, **call.query.options())
    items = [model_answer(model) for model in page.items]
    return Reply(body=ModelPage(items=items, next_page_token=page.next_token))


def create_model(call: Call) -> Reply:
    """A new model without versions."""
    body: CreateModel = call.body
    model = call.registry.create_model(
        body.model_id,
        description=body.description,
        tags=body.tags,
        sla=sla_of(body.sla),
        actor=call.actor,
        request_key=call.request_key,
    )
    return Reply(body=model_answer(model), status=201)


def get_model(call: Call) -> Reply:
    """One model."""
    return Reply(body=model_answer(call.registry.get_model(call.model_id)))


def update_model(call: Call) -> Reply:
    """Another description or SLA."""
    body: UpdateModel = call.body
    if body.description is not None:
        call.registry.describe_model(call.model_id, body.description, actor=call.actor)
    if not isinstance(body.sla, msgspec.UnsetType):
        call.registry.set_sla(call.model_id, sla_of(body.sla), actor=call.actor)
    return get_model(call)


def delete_model(call: Call) -> Reply:
    """Remove a model of which no version serves."""
    call.registry.delete_model(call.model_id, actor=call.actor)
    return Reply(body=None, status=204)


def rename_model(call: Call) -> Reply:
    """Another name."""
    model = call.registry.rename_model(call.model_id, call.body.model_id, actor=call.actor)
    return Reply(body=model_answer(model))


def tag_model(call: Call) -> Reply:
    """Set and remove tags."""
    change: ChangeTags = call.body
    call.registry.set_tags(call.model_id, put=change.put, drop=change.drop, actor=call.actor)
    return get_model(call)


def point_alias(call: Call) -> Reply:
    """Let an alias point to a version."""
    version = require_version(call.body.version)
    call.registry.set_alias(call.model_id, call.path["alias"], version, actor=call.actor)
    return get_model(call)


def drop_alias(call: Call) -> Reply:
    """Remove an alias."""
    call.registry.delete_alias(call.model_id, call.path["alias"], actor=call.actor)
    return Reply(body=None, status=204)


def get_production(call: Call) -> Reply:
    """What serves now, or what served at a moment."""
    at = call.query.moment()
    if at is None:
        version = call.registry.get_model(call.model_id).production
    else:
        version = call.registry.production_at(call.model_id, at)
    text = None if version is None else str(version)
    return Reply(body=ProductionAnswer(model_id=call.model_id, at=at, version=text))


def roll_back(call: Call) -> Reply:
    """Deprecate what serves and let an earlier version serve again."""
    body: RollBack = call.body
    done = call.registry.rollback(
        call.model_id,
        to=_optional_version(body.to),
        reason=body.reason,
        actor=call.actor,
    )
    return Reply(
        body=RollbackAnswer(
            previous=str(done.previous),
            current=str(done.current),
            reasons=list(done.reasons),
            audit_sequence=done.audit_sequence,
        )
    )


def get_history(call: Call) -> Reply:
    """The audit of a model, the oldest row first."""
    query: HistoryQuery = call.query
    entries = call.registry.history(
        call.model_id,
        version=_optional_version(query.version),
        after=query.after,
        limit=query.page_size,
    )
    full = len(entries) == query.page_size
    items = [audit_answer(entry) for entry in entries]
    return Reply(body=HistoryPage(items=items, next_after=items[-1].sequence if full else None))


OPERATIONS = (
    Operation(
        name="list_models",
        method="GET",
        path="/api/v1/models",
        scope=Scope.READ,
        summary="Models that match a filter, page by page.",
        run=list_models,
        query=SearchQuery,
        answer=ModelPage,
    ),
    Operation(
        name="create_model",
        method="POST",
        path="/api/v1/models",
        scope=Scope.WRITE,
        summary="A new model without versions.",
        run=create_model,
        body=CreateModel,
        answer=ModelAnswer,
        status=201,
        errors=(409,),
        idempotent=True,
    ),
    Operation(
        name="get_model",
        method="GET",
        path=_MODEL,
        scope=Scope.READ,
        summary="What holds for all versions of a model.",
        run=get_model,
        answer=ModelAnswer,
        quick=True,
    ),
    Operation(
        name="update_model",
        method="PATCH",
        path=_MODEL,
        scope=Scope.ADMIN,
        summary="Another description or SLA; a null SLA removes it.",
        run=update_model,
        body=UpdateModel,
        answer=ModelAnswer,
    ),
    Operation(
        name="delete_model",
        method="DELETE",
        path=_MODEL,
        scope=Scope.ADMIN,
        summary="Remove a model of which no version serves; the audit keeps its history.",
        run=delete_model,
        answer=None,
        status=204,
        errors=(409,),
    ),
    Operation(
        name="rename_model",
        method="POST",
        path=f"{_MODEL}/rename",
        scope=Scope.ADMIN,
        summary="Give a model another name; versions and history stay with it.",
        run=rename_model,
        body=RenameModel,
        answer=ModelAnswer,
        errors=(409,),
    ),
    Operation(
        name="tag_model",
        method="PATCH",
        path=f"{_MODEL}/tags",
        scope=Scope.WRITE,
        summary="Set and remove tags of a model.",
        run=tag_model,
        body=ChangeTags,
        answer=ModelAnswer,
    ),
    Operation(
        name="point_alias",
        method="PUT",
        path=f"{_MODEL}/aliases/{{alias}}",
        scope=Scope.WRITE,
        summary="Let an alias point to a version, wherever it pointed before.",
        run=point_alias,
        body=PointAlias,
        answer=ModelAnswer,
    ),
    Operation(
        name="drop_alias",
        method="DELETE",
        path=f"{_MODEL}/aliases/{{alias}}",
        scope=Scope.WRITE,
        summary="Remove an alias.",
        run=drop_alias,
        answer=None,
        status=204,
    ),
    Operation(
        name="get_production",
        method="GET",
        path=f"{_MODEL}/production",
        scope=Scope.READ,
        summary="The version that serves now, or that served at a moment.",
        run=get_production,
        query=ProductionQuery,
        answer=ProductionAnswer,
        quick=True,
    ),
    Operation(
        name="roll_back",
        method="POST",
        path=f"{_MODEL}/rollback",
        scope=Scope.PROMOTE,
        summary="Deprecate what serves and let the best version standing by serve, in one step.",
        run=roll_back,
        body=RollBack,
        answer=RollbackAnswer,
        errors=(409,),
    ),
    Operation(
        name="get_history",
        method="GET",
        path=f"{_MODEL}/history",
        scope=Scope.READ,
        summary="Who did what, when, why and on what evidence; also of a deleted model.",
        run=get_history,
        query=HistoryQuery,
        answer=HistoryPage,
    ),
)
