"""REST operations on models: create, describe, label, roll back and delete them, and read their history."""

from __future__ import annotations

import msgspec

from tensorforge.registry.domain.versions import ModelVersion, require_version
from tensorforge.registry.service.operations import (
    CREATES_ONCE,
    Call,
    OperationTable,
    Reply,
    require_scope,
)
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
    model_answer,
    sla_of,
)
from tensorforge.registry.service.shared_wire import ChangeTags, SearchQuery
from tensorforge.registry.tokens import Scope

OPERATIONS = OperationTable()
_MODELS = "/api/v1/models"
_MODEL = f"{_MODELS}/{{model_id}}"
_ALIAS = f"{_MODEL}/aliases/{{alias}}"


def _optional_version(text: str | None) -> ModelVersion | None:
    return None if text is None else require_version(text)


@OPERATIONS.declare("GET", _MODELS, Scope.READ, query=SearchQuery, answer=ModelPage)
def list_models(call: Call) -> Reply:
    """List the models that match a filter, page by page."""
    page = call.registry.search_models(call.query.filter, **call.query.options())
    items = [model_answer(model) for model in page.items]
    return Reply(body=ModelPage(items=items, next_page_token=page.next_token))


@OPERATIONS.declare(
    "POST", _MODELS, Scope.WRITE, body=CreateModel, answer=ModelAnswer, **CREATES_ONCE
)
def create_model(call: Call) -> Reply:
    """Create a model without versions."""
    body: CreateModel = call.body
    model = call.registry.create_model(
        body.model_id,
        description=body.description,
        tags=body.tags,
        sla=sla_of(body.sla),
        actor=call.actor,
        request_key=call.request_key,
    )
    return Reply(body=model_answer(model))


@OPERATIONS.declare("GET", _MODEL, Scope.READ, answer=ModelAnswer, quick=True)
def get_model(call: Call) -> Reply:
    """Read a model."""
    return Reply(body=model_answer(call.registry.get_model(call.model_id)))


@OPERATIONS.declare("PATCH", _MODEL, Scope.ADMIN, body=UpdateModel, answer=ModelAnswer)
def update_model(call: Call) -> Reply:
    """Replace a model's description or SLA; a null SLA removes it."""
    body: UpdateModel = call.body
    if body.description is not None:
        call.registry.describe_model(call.model_id, body.description, actor=call.actor)
    if not isinstance(body.sla, msgspec.UnsetType):
        call.registry.set_sla(call.model_id, sla_of(body.sla), actor=call.actor)
    return get_model(call)


@OPERATIONS.declare("DELETE", _MODEL, Scope.ADMIN, status=204, errors=(409,))
def delete_model(call: Call) -> Reply:
    """Remove a model of which no version serves; the audit keeps its history."""
    call.registry.delete_model(call.model_id, actor=call.actor)
    return Reply()


@OPERATIONS.declare(
    "POST", f"{_MODEL}/rename", Scope.ADMIN, body=RenameModel, answer=ModelAnswer, errors=(409,)
)
def rename_model(call: Call) -> Reply:
    """Give a model another name; its versions and history stay with it."""
    require_scope(Scope.ADMIN, call.principal, call.body.model_id)
    model = call.registry.rename_model(call.model_id, call.body.model_id, actor=call.actor)
    return Reply(body=model_answer(model))


@OPERATIONS.declare("PATCH", f"{_MODEL}/tags", Scope.WRITE, body=ChangeTags, answer=ModelAnswer)
def tag_model(call: Call) -> Reply:
    """Set and remove tags of a model."""
    change: ChangeTags = call.body
    call.registry.set_tags(call.model_id, put=change.put, drop=change.drop, actor=call.actor)
    return get_model(call)


@OPERATIONS.declare("PUT", _ALIAS, Scope.WRITE, body=PointAlias, answer=ModelAnswer, errors=(409,))
def point_alias(call: Call) -> Reply:
    """Point an alias at a version; an alias that points at another version is replaced."""
    version = require_version(call.body.version)
    alias = call.path["alias"]
    rule = call.alias_rule(alias)
    call.registry.set_alias(call.model_id, alias, version, actor=call.actor, **rule)
    return get_model(call)


@OPERATIONS.declare("DELETE", _ALIAS, Scope.WRITE, status=204)
def drop_alias(call: Call) -> Reply:
    """Remove an alias."""
    call.alias_rule(call.path["alias"])
    call.registry.delete_alias(call.model_id, call.path["alias"], actor=call.actor)
    return Reply()


@OPERATIONS.declare(
    "GET",
    f"{_MODEL}/production",
    Scope.READ,
    query=ProductionQuery,
    answer=ProductionAnswer,
    quick=True,
)
def get_production(call: Call) -> Reply:
    """Read which version serves now, or served at a moment."""
    at = call.query.moment()
    if at is None:
        version = call.registry.get_model(call.model_id).production
    else:
        version = call.registry.production_at(call.model_id, at)
    text = None if version is None else str(version)
    return Reply(body=ProductionAnswer(model_id=call.model_id, at=at, version=text))


@OPERATIONS.declare(
    "POST",
    f"{_MODEL}/rollback",
    Scope.TRANSITION,
    body=RollBack,
    answer=RollbackAnswer,
    errors=(409,),
)
def roll_back(call: Call) -> Reply:
    """Deprecate the version that serves and let another version in production serve, in one step."""
    body: RollBack = call.body
    done = call.registry.rollback(
        call.model_id,
        to=_optional_version(body.to),
        reason=body.reason,
        actor=call.actor,
    )
    answer = RollbackAnswer.of(done, previous=str(done.previous), current=str(done.current))
    return Reply(body=answer)


@OPERATIONS.declare("GET", f"{_MODEL}/history", Scope.READ, query=HistoryQuery, answer=HistoryPage)
def get_history(call: Call) -> Reply:
    """Read who did what, when, why and on what evidence; also of a deleted model."""
    query: HistoryQuery = call.query
    entries = call.registry.history(
        call.model_id,
        version=_optional_version(query.version),
        after=query.after,
        limit=query.page_size,
    )
    full = len(entries) == query.page_size
    next_after = entries[-1].sequence if full else None
    return Reply(body=HistoryPage(items=entries, next_after=next_after))
