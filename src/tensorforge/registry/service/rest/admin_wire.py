"""Requests about the audit and the webhooks, and their answers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from tensorforge.registry.domain.names import MAX_NAME
from tensorforge.registry.service.shared_wire import Answer, WireRequest


class CreateWebhook(WireRequest):
    """The URL to report changes to.

    Without `actions` every kind of change is reported, without `model_id` those of every model.
    """

    url: Annotated[str, Meta(min_length=1, max_length=2_000)]
    model_id: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    actions: Annotated[list[Annotated[str, Meta(max_length=40)]], Meta(max_length=20)] = (
        msgspec.field(default_factory=list)
    )


class AuditState(Answer):
    """Whether the audit is intact: if so its head, otherwise the problem."""

    intact: bool
    sequence: int | None = None
    hash: str | None = None
    problem: str | None = None


class WebhookAnswer(Answer):
    """A webhook. `secret` is shown only when the webhook is created."""

    webhook_id: int
    url: str
    model_id: str
    actions: tuple[str, ...]
    created_at: datetime
    created_by: str
    secret: str | None = None


class WebhookList(Answer):
    """All webhooks."""

    items: list[WebhookAnswer]


class DeliveryAnswer(Answer):
    """A message to a webhook, and how its delivery went so far."""

    delivery_id: int
    sequence: int
    status: str
    attempts: int
    due_at: datetime
    last_error: str


class DeliveryList(Answer):
    """Messages to a webhook."""

    items: list[DeliveryAnswer]
