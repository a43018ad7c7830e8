"""Operations on versions: register, find, validate, move, compare."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tensorforge.registry.database.reads.search import Page
from tensorforge.registry.domain.models import ModelMetadata
from tensorforge.registry.domain.version_ranges import parse_range
from tensorforge.registry.domain.versions import require_version
from tensorforge.registry.service.operations import Call, Operation, Reply
from tensorforge.registry.service.rest.validations_wire import (
    CanaryAnswer,
    RecordValidation,
    ValidationAnswer,
    ValidationList,
    canary_answer,
    validation_answer,
)
from tensorforge.registry.service.rest.versions_wire import (
    CreatedVersion,
    CreateVersion,
    DiffAnswer,
    DiffQuery,
    Move,
    ResolveQuery,
    TransitionAnswer,
    UpdateVersion,
    VersionAnswer,
    VersionPage,
    VersionsQuery,
    diff_answer,
    due_answer,
    version_answer,
)
from tensorforge.registry.service.shared_wire import ChangeTags, LimitQuery, SearchQuery
from tensorforge.registry.tokens import Scope

_VERSIONS = "/api/v1/models/{model_id}/versions"
_VERSION = f"{_VERSIONS}/{{version}}"


def _one(metadata: ModelMetadata) -> Reply:
    return Reply(body=version_answer(metadata), etag=metadata.revision)


def _some(page: Page[ModelMetadata]) -> Reply:
    items = [version_answer(metadata) for metadata in page.items]
    return Reply(body=VersionPage(items=items, next_page_token=page.next_token))


def search_versions(call: Call) -> Reply:
    """A page of versions of all models."""
    return _some(call.registry.search_versions(call.query.filter, **call.query.options()))


def list_versions(call: Call) -> Reply:
    """A page of one model's versions."""
    place: dict[str, Any] = {"model_id": call.model_id, "versions": parse_range(call.query.range)}
    return _some(call.registry.search_versions(call.query.filter, **place, **call.query.options()))


def create_version(call: Call) -> Reply:
    """A new version, under the given number or the next one that is due."""
    body: CreateVersion = call.body
    metadata = body.metadata(call.model_id, datetime.now(UTC))
    how: dict[str, Any] = {
        "tensors": body.specs(),
        "actor": call.actor,
        "request_key": call.request_key,
    }
    if body.version is not None:
        kept, due = call.registry.register(metadata, **how), None
    else:
        kept, due = call.registry.register_next(metadata, least=body.least_bump, **how)
    answer = CreatedVersion(
        version=version_answer(kept), due=None if due is None else due_answer(due)
    )
    return Reply(body=answer, status=201, etag=kept.revision)


def get_version(call: Call) -> Reply:
    """One version."""
    return _one(call.registry.require(call.model_id, call.version))


def resolve_version(call: Call) -> Reply:
    """The version that a range, a state, an alias or `latest` means."""
    return _one(call.registry.resolve(call.model_id, call.query.version))


def update_version(call: Call) -> Reply:
    """Another description."""
    text = call.body.description
    return _one(call.registry.describe_version(call.model_id, call.version, text, actor=call.actor))


def delete_version(call: Call) -> Reply:
    """Remove a version that does not serve."""
    call.registry.delete_version(call.model_id, call.version, actor=call.actor)
    return Reply(body=None, status=204)


def tag_version(call: Call) -> Reply:
    """Set and remove tags."""
    change: ChangeTags = call.body
    call.registry.set_tags(
        call.model_id, call.version, put=change.put, drop=change.drop, actor=call.actor
    )
    return get_version(call)


def move_version(call: Call) -> Reply:
    """Move a version along the lifecycle."""
    body: Move = call.body
    done = call.registry.transition_state(
        call.model_id,
        call.version,
        body.to,
        actor=call.actor,
        reason=body.reason,
        force=body.force,
        expected_revision=call.expected_revision(),
        retire_previous=body.retire_previous,
    )
    answer = TransitionAnswer(
        previous=done.previous,
        audit_sequence=done.audit_sequence,
        version=version_answer(done.metadata),
    )
    return Reply(body=answer, etag=done.metadata.revision)


def record_validation(call: Call) -> Reply:
    """Keep what a validation measured."""
    body: RecordValidation = call.body
    result = body.result(call.model_id, call.path["version"])
    record = call.registry.record_validation(result, actor=call.actor)
    return Reply(body=validation_answer(record), status=201)


def list_validations(call: Call) -> Reply:
    """What was measured, the newest first."""
    records = call.registry.validations(call.model_id, call.version, limit=call.query.page_size)
    items = [validation_answer(record) for record in records]
    return Reply(body=ValidationList(items=items))


def judge_canary(call: Call) -> Reply:
    """What the newest validation allows to say of a canary."""
    decision = call.registry.canary_decision(call.model_id, call.version)
    return Reply(body=canary_answer(decision))


def compare_versions(call: Call) -> Reply:
    """What changed between two versions."""
    before, after = require_version(call.query.before), require_version(call.query.after)
    return Reply(body=diff_answer(call.registry.diff(call.model_id, before, after)))


OPERATIONS = (
    Operation(
        name="search_versions",
        method="GET",
        path="/api/v1/versions",
        scope=Scope.READ,
        summary="Versions of all models that match a filter, the newest first, page by page.",
        run=search_versions,
        query=SearchQuery,
        answer=VersionPage,
    ),
    Operation(
        name="list_versions",
        method="GET",
        path=_VERSIONS,
        scope=Scope.READ,
        summary="Versions of one model within a range that match a filter.",
        run=list_versions,
        query=VersionsQuery,
        answer=VersionPage,
    ),
    Operation(
        name="create_version",
        method="POST",
        path=_VERSIONS,
        scope=Scope.WRITE,
        summary="A new version. Its source is kept as text and never opened.",
        run=create_version,
        body=CreateVersion,
        answer=CreatedVersion,
        status=201,
        errors=(409,),
        idempotent=True,
        etag=True,
    ),
    Operation(
        name="get_version",
        method="GET",
        path=_VERSION,
        scope=Scope.READ,
        summary="One version; its ETag is what a move must send as If-Match.",
        run=get_version,
        answer=VersionAnswer,
        etag=True,
        quick=True,
    ),
    Operation(
        name="update_version",
        method="PATCH",
        path=_VERSION,
        scope=Scope.WRITE,
        summary="Another description.",
        run=update_version,
        body=UpdateVersion,
        answer=VersionAnswer,
        etag=True,
    ),
    Operation(
        name="delete_version",
        method="DELETE",
        path=_VERSION,
        scope=Scope.ADMIN,
        summary="Remove a version that does not serve; the audit keeps its history.",
        run=delete_version,
        answer=None,
        status=204,
        errors=(409,),
    ),
    Operation(
        name="tag_version",
        method="PATCH",
        path=f"{_VERSION}/tags",
        scope=Scope.WRITE,
        summary="Set and remove tags of a version.",
        run=tag_version,
        body=ChangeTags,
        answer=VersionAnswer,
        etag=True,
    ),
    Operation(
        name="move_version",
        method="POST",
        path=f"{_VERSION}/transitions",
        scope=Scope.PROMOTE,
        summary="Move a version along the lifecycle, if nobody moved it meanwhile.",
        run=move_version,
        body=Move,
        answer=TransitionAnswer,
        errors=(409,),
        if_match=True,
        etag=True,
    ),
    Operation(
        name="record_validation",
        method="POST",
        path=f"{_VERSION}/validations",
        scope=Scope.WRITE,
        summary="Keep what a validation measured, as evidence for the state the version is in.",
        run=record_validation,
        body=RecordValidation,
        answer=ValidationAnswer,
        status=201,
    ),
    Operation(
        name="list_validations",
        method="GET",
        path=f"{_VERSION}/validations",
        scope=Scope.READ,
        summary="The validations of a version, the newest first.",
        run=list_validations,
        query=LimitQuery,
        answer=ValidationList,
    ),
    Operation(
        name="judge_canary",
        method="GET",
        path=f"{_VERSION}/canary",
        scope=Scope.READ,
        summary="Pass, fail or inconclusive, with reasons, against the SLA and what serves now.",
        run=judge_canary,
        answer=CanaryAnswer,
    ),
    Operation(
        name="resolve_version",
        method="GET",
        path="/api/v1/models/{model_id}/resolve",
        scope=Scope.READ,
        summary="The version that ^1.2, latest, a state or an alias means.",
        run=resolve_version,
        query=ResolveQuery,
        answer=VersionAnswer,
        etag=True,
        quick=True,
    ),
    Operation(
        name="compare_versions",
        method="GET",
        path="/api/v1/models/{model_id}/diff",
        scope=Scope.READ,
        summary="What changed between two versions, and which bump the change calls for.",
        run=compare_versions,
        query=DiffQuery,
        answer=DiffAnswer,
    ),
)
