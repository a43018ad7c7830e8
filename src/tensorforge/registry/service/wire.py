"""What goes over the wire: requests and answers as typed structures."""

from __future__ import annotations

import dataclasses
import math
from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tensorforge.registry.audit import AuditEntry
from tensorforge.registry.comparison import VersionDiff
from tensorforge.registry.lifecycle import DeploymentState
from tensorforge.registry.models import (
    Lineage,
    ModelMetadata,
    RegisteredModel,
    Sla,
    TensorSpec,
    ValidationRecord,
    ValidationResult,
)
from tensorforge.registry.names import (
    MAX_ALIAS,
    MAX_NAME,
    MAX_TAG_KEY,
    MAX_TAG_VALUE,
    MAX_TAGS,
    MAX_TEXT,
)
from tensorforge.registry.selection import CanaryDecision
from tensorforge.registry.versions import Bump, require_version

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Alias = Annotated[str, Meta(min_length=1, max_length=MAX_ALIAS)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Version = Annotated[str, Meta(pattern=r"^[0-9]{1,10}\.[0-9]{1,10}\.[0-9]{1,10}$", max_length=32)]
Whole = Annotated[int, Meta(ge=0, le=2**53)]
TagKey = Annotated[str, Meta(min_length=1, max_length=MAX_TAG_KEY)]
Tags = Annotated[
    dict[TagKey, Annotated[str, Meta(max_length=MAX_TAG_VALUE)]], Meta(max_length=MAX_TAGS)
]
Shape = Annotated[list[Whole], Meta(max_length=64)]
Latency = Annotated[float, Meta(ge=0)]
PageSize = Annotated[int, Meta(ge=1, le=10_000)]
PageToken = Annotated[str, Meta(max_length=2_000)]


class Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A body or the query parameters of a request: what is not listed is refused."""


class Answer(msgspec.Struct, kw_only=True):
    """The body of an answer."""


class Nothing(Request):
    """No query parameters."""


class SlaBody(Request):
    """What every version must reach."""

    max_latency_ms: Annotated[float, Meta(gt=0)]
    min_accuracy: float

    def value(self) -> Sla:
        """The SLA that this describes."""
        return Sla(max_latency_ms=self.max_latency_ms, min_accuracy=self.min_accuracy)


class CreateModel(Request):
    """A new model."""

    model_id: Name
    description: Text = ""
    tags: Tags = {}
    sla: SlaBody | None = None


class UpdateModel(Request):
    """What is to change of a model; what is left out stays."""

    description: Text | None = None
    sla: SlaBody | msgspec.UnsetType | None = msgspec.UNSET


class RenameModel(Request):
    """A new name."""

    model_id: Name


class ChangeTags(Request):
    """Tags to set and keys to remove."""

    put: Tags = {}
    drop: Annotated[list[TagKey], Meta(max_length=MAX_TAGS)] = []


class PointAlias(Request):
    """The version that an alias is to point to."""

    version: Version


class TensorBody(msgspec.Struct, forbid_unknown_fields=True):
    """Type and shape of a tensor."""

    dtype: Annotated[str, Meta(min_length=1, max_length=40)]
    shape: Shape


class CreateVersion(Request):
    """A new version. Without `version` the next one that the change of shapes calls for is taken."""

    version: Version | None = None
    least_bump: Bump = Bump.PATCH
    name: Annotated[str, Meta(max_length=500)] = ""
    framework: Annotated[str, Meta(max_length=100)] = "pytorch"
    input_shape: Shape = []
    output_shape: Shape = []
    size_bytes: Whole = 0
    checksum: Annotated[str, Meta(max_length=500)] = ""
    source: Annotated[str, Meta(max_length=2_000)] = ""
    description: Text = ""
    tags: Tags = {}
    run_id: Annotated[str, Meta(max_length=500)] = ""
    step: Whole | None = None
    checkpoint_id: Annotated[str, Meta(max_length=500)] = ""
    run_link: Annotated[str, Meta(max_length=2_000)] = ""
    tensors: Annotated[dict[str, TensorBody], Meta(max_length=100_000)] = {}

    def metadata(self, model_id: str, now: datetime) -> ModelMetadata:
        """The version that this describes."""
        return ModelMetadata(
            model_id=model_id,
            name=self.name or model_id,
            version=require_version(self.version or "0.0.0"),
            framework=self.framework,
            input_shape=tuple(self.input_shape),
            output_shape=tuple(self.output_shape),
            size_bytes=self.size_bytes,
            checksum=self.checksum,
            registered_at=now,
            source=self.source,
            description=self.description,
            tags=self.tags,
            lineage=Lineage(
                run_id=self.run_id,
                step=self.step,
                checkpoint_id=self.checkpoint_id,
                run_link=self.run_link,
            ),
        )

    def specs(self) -> dict[str, TensorSpec]:
        """The declared tensors."""
        return {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in self.tensors.items()}


class UpdateVersion(Request):
    """What is to change of a version."""

    description: Text


class Move(Request):
    """A move along the lifecycle."""

    to: DeploymentState
    reason: Text = ""
    force: bool = False
    retire_previous: bool = False


class RollBack(Request):
    """A rollback; without `to` the best version standing by serves."""

    reason: Text = ""
    to: Version | None = None


class RecordValidation(Request):
    """What a validation measured."""

    passed: bool
    latency_p50_ms: Latency
    latency_p99_ms: Latency
    accuracy_score: float
    errors: Annotated[list[Text], Meta(max_length=100)] = []
    samples: Whole | None = None

    def result(self, model_id: str, version: str) -> ValidationResult:
        """The validation that this describes."""
        return ValidationResult(
            model_id=model_id,
            version=require_version(version),
            passed=self.passed,
            latency_p50_ms=self.latency_p50_ms,
            latency_p99_ms=self.latency_p99_ms,
            accuracy_score=self.accuracy_score,
            errors=tuple(self.errors),
            samples=self.samples,
        )


class SearchQuery(Request):
    """A filter, an order and a page."""

    filter: Annotated[str, Meta(max_length=5_000)] = ""
    order_by: Annotated[str, Meta(max_length=500)] = ""
    page_size: PageSize = 100
    page_token: PageToken | None = None

    def options(self) -> dict[str, Any]:
        """The page and order as the registry takes them."""
        clauses = [clause.strip() for clause in self.order_by.split(",")] if self.order_by else []
        return {"order_by": clauses, "limit": self.page_size, "token": self.page_token}


class VersionsQuery(SearchQuery):
    """The same, within a range of versions."""

    range: Annotated[str, Meta(max_length=200)] = "*"


class HistoryQuery(Request):
    """Which part of the audit."""

    version: Version | None = None
    after: Whole = 0
    page_size: PageSize = 100


class LimitQuery(Request):
    """How many."""

    page_size: PageSize = 100


class ProductionQuery(Request):
    """At which moment; now if left out."""

    at: Annotated[datetime, Meta(tz=True)] | None = None


class ResolveQuery(Request):
    """A range, a state, an alias or `latest`."""

    version: Annotated[str, Meta(min_length=1, max_length=200)]


class DiffQuery(Request):
    """The two versions to compare."""

    before: Version
    after: Version


class CreateWebhook(Request):
    """Who wants to be told of what; everything if nothing is named."""

    url: Annotated[str, Meta(min_length=1, max_length=2_000)]
    model_id: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    actions: Annotated[list[Annotated[str, Meta(max_length=40)]], Meta(max_length=20)] = []


class SlaAnswer(Answer):
    """What every version must reach."""

    max_latency_ms: float
    min_accuracy: float


class ModelAnswer(Answer):
    """A model."""

    model_id: str
    description: str
    created_at: datetime
    updated_at: datetime
    tags: dict[str, str]
    aliases: dict[str, str]
    sla: SlaAnswer | None
    production: str | None
    version_count: int


class LineageAnswer(Answer):
    """Where a version came from."""

    run_id: str
    step: int | None
    checkpoint_id: str
    run_link: str


class VersionAnswer(Answer):
    """A version."""

    model_id: str
    version: str
    number: int
    revision: int
    state: DeploymentState
    name: str
    framework: str
    input_shape: list[int]
    output_shape: list[int]
    size_bytes: int
    checksum: str
    source: str
    description: str
    tags: dict[str, str]
    aliases: list[str]
    lineage: LineageAnswer
    registered_at: datetime
    registered_by: str
    updated_at: datetime | None


class DueBumpAnswer(Answer):
    """Which bump a change calls for, and why."""

    bump: Bump
    reasons: list[str]


class CreatedVersion(Answer):
    """The new version, and why it got its number if the registry chose it."""

    version: VersionAnswer
    due: DueBumpAnswer | None


class ModelPage(Answer):
    """Some models."""

    items: list[ModelAnswer]
    next_page_token: str | None


class VersionPage(Answer):
    """Some versions."""

    items: list[VersionAnswer]
    next_page_token: str | None


class TransitionAnswer(Answer):
    """A move that was made."""

    previous: DeploymentState
    audit_sequence: int
    version: VersionAnswer


class RollbackAnswer(Answer):
    """A rollback that was made."""

    previous: str
    current: str
    reasons: list[str]
    audit_sequence: int


class ValidationAnswer(Answer):
    """A validation. A figure that was not measured, or is not finite, is null."""

    record_id: int
    passed: bool
    latency_p50_ms: float | None
    latency_p99_ms: float | None
    accuracy_score: float | None
    errors: list[str]
    samples: int | None
    state: DeploymentState
    revision: int
    recorded_at: datetime
    recorded_by: str


class ValidationList(Answer):
    """Some validations."""

    items: list[ValidationAnswer]


class CanaryAnswer(Answer):
    """A verdict with its reasons."""

    verdict: str
    reasons: list[str]


class AuditAnswer(Answer):
    """A row of the audit."""

    sequence: int
    at: datetime
    actor: str
    action: str
    model_id: str
    version: str
    from_state: str
    to_state: str
    reason: str
    evidence: dict[str, Any]
    forced: bool
    previous_hash: str
    hash: str


class HistoryPage(Answer):
    """Some rows of the audit."""

    items: list[AuditAnswer]
    next_after: int | None


class AuditState(Answer):
    """Whether the audit is intact: its head, or what is wrong with it."""

    intact: bool
    sequence: int | None = None
    hash: str | None = None
    problem: str | None = None


class ProductionAnswer(Answer):
    """Which version serves or served."""

    model_id: str
    at: datetime | None
    version: str | None


class DiffAnswer(Answer):
    """What changed between two versions."""

    before: str
    after: str
    due: DueBumpAnswer
    compatibility: float
    fields: dict[str, list[str]]
    tags: dict[str, list[str | None]]
    rollback_priority: float | None
    rollback_reasons: list[str]


class WebhookAnswer(Answer):
    """A webhook. `secret` is given once, when the webhook is made."""

    webhook_id: int
    url: str
    model_id: str
    actions: list[str]
    created_at: datetime
    created_by: str
    secret: str | None = None


class WebhookList(Answer):
    """All webhooks."""

    items: list[WebhookAnswer]


class DeliveryAnswer(Answer):
    """A message to a webhook."""

    delivery_id: int
    sequence: int
    status: str
    attempts: int
    due_at: datetime
    last_error: str


class DeliveryList(Answer):
    """Some messages to a webhook."""

    items: list[DeliveryAnswer]


class HealthAnswer(Answer):
    """Whether the service works."""

    status: str


class ErrorAnswer(Answer):
    """What went wrong: the kind of error, and a message that says what to do."""

    error: str
    message: str


def model_answer(model: RegisteredModel) -> ModelAnswer:
    """A model as the wire shows it."""
    sla = model.sla
    return ModelAnswer(
        model_id=model.model_id,
        description=model.description,
        created_at=model.created_at,
        updated_at=model.updated_at,
        tags=dict(model.tags),
        aliases={alias: str(version) for alias, version in model.aliases.items()},
        sla=None if sla is None else SlaAnswer(**dataclasses.asdict(sla)),
        production=None if model.production is None else str(model.production),
        version_count=model.version_count,
    )


def version_answer(metadata: ModelMetadata) -> VersionAnswer:
    """A version as the wire shows it."""
    lineage = metadata.lineage
    return VersionAnswer(
        model_id=metadata.model_id,
        version=str(metadata.version),
        number=metadata.number,
        revision=metadata.revision,
        state=metadata.state,
        name=metadata.name,
        framework=metadata.framework,
        input_shape=list(metadata.input_shape),
        output_shape=list(metadata.output_shape),
        size_bytes=metadata.size_bytes,
        checksum=metadata.checksum,
        source=metadata.source,
        description=metadata.description,
        tags=dict(metadata.tags),
        aliases=list(metadata.aliases),
        lineage=LineageAnswer(
            run_id=lineage.run_id,
            step=lineage.step,
            checkpoint_id=lineage.checkpoint_id,
            run_link=lineage.run_link,
        ),
        registered_at=metadata.registered_at,
        registered_by=metadata.registered_by,
        updated_at=metadata.updated_at,
    )


def validation_answer(record: ValidationRecord) -> ValidationAnswer:
    """A validation as the wire shows it."""
    result = record.result
    return ValidationAnswer(
        record_id=record.record_id,
        passed=result.passed,
        latency_p50_ms=_finite(result.latency_p50_ms),
        latency_p99_ms=_finite(result.latency_p99_ms),
        accuracy_score=_finite(result.accuracy_score),
        errors=list(result.errors),
        samples=result.samples,
        state=record.state,
        revision=record.revision,
        recorded_at=record.recorded_at,
        recorded_by=record.recorded_by,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def audit_answer(entry: AuditEntry) -> AuditAnswer:
    """A row of the audit as the wire shows it."""
    return AuditAnswer(
        sequence=entry.sequence,
        at=entry.at,
        actor=entry.actor,
        action=entry.action,
        model_id=entry.model_id,
        version=entry.version,
        from_state=entry.from_state,
        to_state=entry.to_state,
        reason=entry.reason,
        evidence=dict(entry.evidence),
        forced=entry.forced,
        previous_hash=entry.previous_hash,
        hash=entry.hash,
    )


def canary_answer(decision: CanaryDecision) -> CanaryAnswer:
    """A verdict as the wire shows it."""
    return CanaryAnswer(verdict=decision.verdict.value, reasons=list(decision.reasons))


def diff_answer(diff: VersionDiff) -> DiffAnswer:
    """A comparison as the wire shows it."""
    rollback = diff.rollback
    return DiffAnswer(
        before=str(diff.before.version),
        after=str(diff.after.version),
        due=DueBumpAnswer(bump=diff.due.bump, reasons=list(diff.due.reasons)),
        compatibility=diff.compatibility,
        fields={field: list(pair) for field, pair in diff.fields.items()},
        tags={tag: list(pair) for tag, pair in diff.tags.items()},
        rollback_priority=None if rollback is None else rollback.priority,
        rollback_reasons=[] if rollback is None else list(rollback.reasons),
    )
