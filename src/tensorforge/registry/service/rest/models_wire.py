"""Requests about models, and the answers to them."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tensorforge.errors import InvalidInputError
from tensorforge.registry.database.audit import AuditEntry
from tensorforge.registry.domain.models import RegisteredModel, Sla
from tensorforge.registry.service.shared_wire import (
    Answer,
    Name,
    PageSize,
    Request,
    Tags,
    Text,
    Version,
    Whole,
)


class SlaBody(Request):
    """What every version must reach."""

    max_latency_ms: Annotated[float, Meta(gt=0)]
    min_accuracy: float


def sla_of(body: SlaBody | None) -> Sla | None:
    """The SLA that a request describes, if it does."""
    if body is None:
        return None
    return Sla(max_latency_ms=body.max_latency_ms, min_accuracy=body.min_accuracy)


class CreateModel(Request):
    """A new model."""

    model_id: Name
    description: Text = ""
    tags: Tags = msgspec.field(default_factory=dict)
    sla: SlaBody | None = None


class UpdateModel(Request):
    """What is to change of a model; what is left out stays."""

    description: Text | None = None
    sla: SlaBody | msgspec.UnsetType | None = msgspec.UNSET


class RenameModel(Request):
    """A new name."""

    model_id: Name


class PointAlias(Request):
    """The version that an alias is to point to."""

    version: Version


class RollBack(Request):
    """A rollback; without `to` the best version standing by serves."""

    reason: Text = ""
    to: Version | None = None


# Read as a text: a query parameter that is read as a time may also be a number of seconds.
Moment = Annotated[str, Meta(max_length=100, extra_json_schema={"format": "date-time"})]


class ProductionQuery(Request):
    """At which moment; now if left out."""

    at: Moment | None = None

    def moment(self) -> datetime | None:
        """The moment; `InvalidInputError` unless it is written as ISO 8601 with a time zone."""
        if self.at is None:
            return None
        try:
            moment: datetime = msgspec.convert(self.at, Annotated[datetime, Meta(tz=True)])
        except msgspec.ValidationError as error:
            raise InvalidInputError(f"at = {self.at[:60]!r}: {error}") from error
        return moment


class HistoryQuery(Request):
    """Which part of the audit."""

    version: Version | None = None
    after: Whole = 0
    page_size: PageSize = 100


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


class ModelPage(Answer):
    """Some models."""

    items: list[ModelAnswer]
    next_page_token: str | None


class RollbackAnswer(Answer):
    """A rollback that was made."""

    previous: str
    current: str
    reasons: list[str]
    audit_sequence: int


class ProductionAnswer(Answer):
    """Which version serves or served."""

    model_id: str
    at: datetime | None
    version: str | None


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
