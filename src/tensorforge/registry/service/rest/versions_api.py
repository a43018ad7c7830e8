"""REST operations on versions: register, find, validate and compare them, and make transitions."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tensorforge.registry.database.reads.search import Page
from tensorforge.registry.domain.models import ModelMetadata
from tensorforge.registry.domain.version_ranges import parse_range
from tensorforge.registry.domain.versions import require_version
from tensorforge.registry.service.operations import CREATES_ONCE, Call, OperationTable, Reply
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
    MakeTransition,
    ResolveQuery,
    TransitionAnswer,
    UpdateVersion,
    VersionAnswer,
    VersionPage,
    VersionsQuery,
    diff_answer,
    version_answer,
)
from tensorforge.registry.service.shared_wire import ChangeTags, LimitQuery, SearchQuery
from tensorforge.registry.tokens import Scope

OPERATIONS = OperationTable()
_MODEL = "/api/v1/models/{model_id}"
_VERSIONS = f"{_MODEL}/versions"
_VERSION = f"{_VERSIONS}/{{version}}"
_ONE_VERSION: dict[str, Any] = {"answer": VersionAnswer, "etag": True}


def _one(metadata: ModelMetadata) -> Reply:
    return Reply(body=version_answer(metadata), etag=metadata.revision)


def _page(page: Page[ModelMetadata]) -> Reply:
    items = [version_answer(metadata) for metadata in page.items]
    return Reply(body=VersionPage(items=items, next_page_token=page.next_token))


@OPERATIONS.declare("GET", "/api/v1/versions", Scope.READ, query=SearchQuery, answer=VersionPage)
def search_versions(call: Call) -> Reply:
    """Search the versions of all models, the newest first, page by page."""
    return _page(call.registry.search_versions(call.query.filter, **call.query.options()))


@OPERATIONS.declare("GET", _VERSIONS, Scope.READ, query=VersionsQuery, answer=VersionPage)
def list_versions(call: Call) -> Reply:
    """List the versions of one model in a range that match a filter."""
    bounds: dict[str, Any] = {"model_id": call.model_id, "versions": parse_range(call.query.range)}
    return _page(call.registry.search_versions(call.query.filter, **bounds, **call.query.options()))


@OPERATIONS.declare(
    "POST",
    _VERSIONS,
    Scope.WRITE,
    body=CreateVersion,
    answer=CreatedVersion,
    etag=True,
    **CREATES_ONCE,
)
def create_version(call: Call) -> Reply:
    """Register a version, under the given version or the next one that is due; its source is never opened."""
    body: CreateVersion = call.body
    metadata = body.metadata(call.model_id, datetime.now(UTC))
    how: dict[str, Any] = {
        "tensors": body.specs(),
        "actor": call.actor,
        "request_key": call.request_key,
    }
    if body.version is not None:
        stored, due = call.registry.register(metadata, **how), None
    else:
        stored, due = call.registry.register_next(metadata, least=body.least_bump, **how)
    answer = CreatedVersion(version=version_answer(stored), due=due)
    return Reply(body=answer, etag=stored.revision)


@OPERATIONS.declare("GET", _VERSION, Scope.READ, quick=True, **_ONE_VERSION)
def get_version(call: Call) -> Reply:
    """Read a version; a transition must send its ETag as If-Match."""
    return _one(call.registry.require(call.model_id, call.version))


@OPERATIONS.declare(
    "GET", f"{_MODEL}/resolve", Scope.READ, query=ResolveQuery, quick=True, **_ONE_VERSION
)
def resolve_version(call: Call) -> Reply:
    """Find the version that ^1.2, latest, a state or an alias names."""
    return _one(call.registry.resolve(call.model_id, call.query.version))


@OPERATIONS.declare("PATCH", _VERSION, Scope.WRITE, body=UpdateVersion, **_ONE_VERSION)
def update_version(call: Call) -> Reply:
    """Replace a version's description."""
    text = call.body.description
    return _one(call.registry.describe_version(call.model_id, call.version, text, actor=call.actor))


@OPERATIONS.declare("DELETE", _VERSION, Scope.ADMIN, status=204, errors=(409,))
def delete_version(call: Call) -> Reply:
    """Remove a version that does not serve; the audit keeps its history."""
    call.registry.delete_version(call.model_id, call.version, actor=call.actor)
    return Reply()


@OPERATIONS.declare("PATCH", f"{_VERSION}/tags", Scope.WRITE, body=ChangeTags, **_ONE_VERSION)
def tag_version(call: Call) -> Reply:
    """Set and remove tags of a version."""
    change: ChangeTags = call.body
    call.registry.set_tags(
        call.model_id, call.version, put=change.put, drop=change.drop, actor=call.actor
    )
    return get_version(call)


@OPERATIONS.declare(
    "POST",
    f"{_VERSION}/transitions",
    Scope.TRANSITION,
    body=MakeTransition,
    answer=TransitionAnswer,
    errors=(409,),
    if_match=True,
    etag=True,
)
def transition_version(call: Call) -> Reply:
    """Take a version into another state, unless it was changed since it was read."""
    body: MakeTransition = call.body
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


@OPERATIONS.declare(
    "POST",
    f"{_VERSION}/validations",
    Scope.WRITE,
    body=RecordValidation,
    answer=ValidationAnswer,
    status=201,
)
def record_validation(call: Call) -> Reply:
    """Store what a validation measured, as evidence for the state the version is in."""
    body: RecordValidation = call.body
    result = body.result(call.model_id, call.path["version"])
    record = call.registry.record_validation(result, actor=call.actor)
    return Reply(body=validation_answer(record))


@OPERATIONS.declare(
    "GET", f"{_VERSION}/validations", Scope.READ, query=LimitQuery, answer=ValidationList
)
def list_validations(call: Call) -> Reply:
    """List the validations of a version, the newest first."""
    records = call.registry.validations(call.model_id, call.version, limit=call.query.page_size)
    items = [validation_answer(record) for record in records]
    return Reply(body=ValidationList(items=items))


@OPERATIONS.declare("GET", f"{_VERSION}/canary", Scope.READ, answer=CanaryAnswer)
def judge_canary(call: Call) -> Reply:
    """Pass, fail or inconclusive, with reasons, by the SLA and by the version that serves."""
    decision = call.registry.canary_decision(call.model_id, call.version)
    return Reply(body=canary_answer(decision))


@OPERATIONS.declare("GET", f"{_MODEL}/diff", Scope.READ, query=DiffQuery, answer=DiffAnswer)
def compare_versions(call: Call) -> Reply:
    """Read what changed between two versions, and which bump the change needs."""
    before, after = require_version(call.query.before), require_version(call.query.after)
    return Reply(body=diff_answer(call.registry.diff(call.model_id, before, after)))
