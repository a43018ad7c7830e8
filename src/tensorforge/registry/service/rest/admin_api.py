"""Operations on the registry itself: its audit and its webhooks."""

from __future__ import annotations

from datetime import UTC, datetime

from tensorforge.errors import IntegrityError, InvalidInputError
from tensorforge.registry.database.outbox import Outbox, Webhook
from tensorforge.registry.database.times import to_micros
from tensorforge.registry.service.operations import Call, Operation, Reply
from tensorforge.registry.service.rest.admin_wire import (
    AuditState,
    CreateWebhook,
    DeliveryAnswer,
    DeliveryList,
    WebhookAnswer,
    WebhookList,
)
from tensorforge.registry.service.shared_wire import LimitQuery
from tensorforge.registry.tokens import Scope

_WEBHOOK = "/api/v1/webhooks/{webhook_id}"


def _outbox(call: Call) -> Outbox:
    return Outbox(call.registry.database)


def _webhook_id(call: Call) -> int:
    text = call.path["webhook_id"]
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 16):
        raise InvalidInputError(f"webhook_id = {text[:40]!r}: must be a whole number")
    return int(text)


def _answer(webhook: Webhook, *, secret: str | None = None) -> WebhookAnswer:
    return WebhookAnswer(
        webhook_id=webhook.webhook_id,
        url=webhook.url,
        model_id=webhook.model_id,
        actions=list(webhook.actions),
        created_at=webhook.created_at,
        created_by=webhook.created_by,
        secret=secret,
    )


def verify_audit(call: Call) -> Reply:
    """Recompute the chain of the audit."""
    try:
        head = call.registry.verify_audit()
    except IntegrityError as error:
        return Reply(body=AuditState(intact=False, problem=str(error)))
    return Reply(body=AuditState(intact=True, sequence=head.sequence, hash=head.hash))


def create_webhook(call: Call) -> Reply:
    """Somebody who wants to be told."""
    body: CreateWebhook = call.body
    webhook = _outbox(call).subscribe(
        body.url,
        actions=body.actions,
        model_id=body.model_id,
        created_by=call.actor.name,
        now_us=to_micros(datetime.now(UTC)),
        allow_private=call.allow_private_webhooks,
    )
    return Reply(body=_answer(webhook, secret=webhook.secret), status=201)


def list_webhooks(call: Call) -> Reply:
    """All webhooks, without their secrets."""
    items = [_answer(webhook) for webhook in _outbox(call).webhooks()]
    return Reply(body=WebhookList(items=items))


def delete_webhook(call: Call) -> Reply:
    """Tell no more."""
    _outbox(call).unsubscribe(_webhook_id(call))
    return Reply(body=None, status=204)


def list_deliveries(call: Call) -> Reply:
    """How the messages for a webhook fared."""
    found = _outbox(call).deliveries(_webhook_id(call), limit=call.query.page_size)
    items = [
        DeliveryAnswer(
            delivery_id=delivery.delivery_id,
            sequence=delivery.sequence,
            status=delivery.status,
            attempts=delivery.attempts,
            due_at=delivery.due_at,
            last_error=delivery.last_error,
        )
        for delivery in found
    ]
    return Reply(body=DeliveryList(items=items))


OPERATIONS = (
    Operation(
        name="verify_audit",
        method="GET",
        path="/api/v1/audit",
        scope=Scope.READ,
        summary="Recompute the audit's chain: its head, or the first row that was tampered with.",
        run=verify_audit,
        answer=AuditState,
    ),
    Operation(
        name="create_webhook",
        method="POST",
        path="/api/v1/webhooks",
        scope=Scope.ADMIN,
        summary="Be told of changes, by signed requests. The secret is shown only now.",
        run=create_webhook,
        body=CreateWebhook,
        answer=WebhookAnswer,
        status=201,
    ),
    Operation(
        name="list_webhooks",
        method="GET",
        path="/api/v1/webhooks",
        scope=Scope.ADMIN,
        summary="All webhooks, without their secrets.",
        run=list_webhooks,
        answer=WebhookList,
    ),
    Operation(
        name="delete_webhook",
        method="DELETE",
        path=_WEBHOOK,
        scope=Scope.ADMIN,
        summary="Remove a webhook and what waits for it.",
        run=delete_webhook,
        answer=None,
        status=204,
    ),
    Operation(
        name="list_deliveries",
        method="GET",
        path=f"{_WEBHOOK}/deliveries",
        scope=Scope.ADMIN,
        summary="How the messages for a webhook fared, the newest first.",
        run=list_deliveries,
        query=LimitQuery,
        answer=DeliveryList,
    ),
)
