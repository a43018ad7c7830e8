"""Requests about the registry itself, and the answers to them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from tensorforge.registry.domain.names import MAX_NAME
from tensorforge.registry.service.shared_wire import Answer, Request

Action = Annotated[str, Meta(max_length=40)]


class CreateWebhook(Request):
    """Who wants to be told of what; everything if nothing is named."""

    url: Annotated[str, Meta(min_length=1, max_length=2_000)]
    model_id: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    actions: Annotated[list[Annotated[str, Meta(max_length=40)]], Meta(max_length=20)] = (
        msgspec.field(default_factory=list)
    )


class AuditState(Answer):
    """Whether the audit is intact: its head, or what is wrong with it."""

    intact: bool
    sequence: int | None = None
    hash: str | None = None
    problem: str | None = None


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
