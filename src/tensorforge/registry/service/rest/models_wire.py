"""Requests about models, and their answers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from tensorforge.errors import InvalidInputError
from tensorforge.registry.database.audit import AuditEntry
from tensorforge.registry.domain.models import RegisteredModel, Sla
from tensorforge.registry.service.shared_wire import (
    Answer,
    Name,
    PageSize,
    Tags,
    Text,
    Version,
    Whole,
    WireRequest,
)


class SlaBody(WireRequest):
    """The limits that every version must meet."""

    max_latency_ms: Annotated[float, Meta(gt=0)]
    min_accuracy: float
    signed_by: Annotated[list[Annotated[str, Meta(max_length=100)]], Meta(max_length=20)] = (
        msgspec.field(default_factory=list)
    )


def sla_of(body: SlaBody | None) -> Sla | None:
    """The SLA in a request, or `None` if it has none."""
    if body is None:
        return None
    return Sla(
        max_latency_ms=body.max_latency_ms,
        min_accuracy=body.min_accuracy,
        signed_by=tuple(body.signed_by),
    )


class CreateModel(WireRequest):
    """A new model."""

    model_id: Name
    description: Text = ""
    tags: Tags = msgspec.field(default_factory=dict)
    sla: SlaBody | None = None


class UpdateModel(WireRequest):
    """The new description or SLA of a model; a field that is left out stays as it is."""

    description: Text | None = None
    sla: SlaBody | msgspec.UnsetType | None = msgspec.UNSET


class RenameModel(WireRequest):
    """The new name of a model."""

    model_id: Name


class PointAlias(WireRequest):
    """The version that an alias will point at."""

    version: Version


class RollBack(WireRequest):
    """A rollback; without `to` the best version that stands by serves."""

    reason: Text = ""
    to: Version | None = None


# Read as a text: msgspec would accept a number of seconds for a query parameter of type datetime.
Moment = Annotated[str, Meta(max_length=100, extra_json_schema={"format": "date-time"})]


class ProductionQuery(WireRequest):
    """At which moment; without it, now."""

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


class HistoryQuery(WireRequest):
    """Which rows of a model's audit: of one version, and with numbers above `after`."""

    version: Version | None = None
    after: Whole = 0
    page_size: PageSize = 100


class ModelAnswer(Answer):
    """A model."""

    model_id: str
    description: str
    created_at: datetime
    updated_at: datetime
    tags: dict[str, str]
    aliases: dict[str, str]
    sla: Sla | None
    production: str | None
    version_count: int


class ModelPage(Answer):
    """A page of models."""

    items: list[ModelAnswer]
    next_page_token: str | None


class RollbackAnswer(Answer):
    """The version that served before a rollback, the one that serves now, and why that one."""

    previous: str
    current: str
    reasons: tuple[str, ...]
    audit_sequence: int


class ProductionAnswer(Answer):
    """The version that serves or served, or null if none."""

    model_id: str
    at: datetime | None
    version: str | None


class HistoryPage(Answer):
    """Rows of the audit; `next_after` is the `after` of the next page, or null after the last."""

    items: list[AuditEntry]
    next_after: int | None


def model_answer(model: RegisteredModel) -> ModelAnswer:
    """The answer that describes a model."""
    return ModelAnswer.of(
        model,
        aliases={alias: str(version) for alias, version in model.aliases.items()},
        production=None if model.production is None else str(model.production),
    )
