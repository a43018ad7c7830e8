"""REST operations on the registry itself: its audit and its webhooks."""

from __future__ import annotations

from datetime import UTC, datetime

from tensorforge.errors import IntegrityError, InvalidInputError
from tensorforge.registry.database.outbox import Outbox
from tensorforge.registry.database.times import to_micros
from tensorforge.registry.service.operations import Call, OperationTable, Reply
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

OPERATIONS = OperationTable()
_WEBHOOKS = "/api/v1/webhooks"
_WEBHOOK = f"{_WEBHOOKS}/{{webhook_id}}"


def _outbox(call: Call) -> Outbox:
    return Outbox(call.registry.database)


def _webhook_id(call: Call) -> int:
    text = call.path["webhook_id"]
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 16):
        raise InvalidInputError(f"webhook_id = {text[:40]!r}: must be a whole number")
    return int(text)


@OPERATIONS.declare("GET", "/api/v1/audit", Scope.READ, answer=AuditState)
def verify_audit(call: Call) -> Reply:
    """Recompute the hashes of the audit: its head, or the first row that was tampered with."""
    try:
        head = call.registry.verify_audit()
    except IntegrityError as error:
        return Reply(body=AuditState(intact=False, problem=str(error)))
    return Reply(body=AuditState(intact=True, sequence=head.sequence, hash=head.hash))


@OPERATIONS.declare(
    "POST", _WEBHOOKS, Scope.ADMIN, body=CreateWebhook, answer=WebhookAnswer, status=201
)
def create_webhook(call: Call) -> Reply:
    """Report changes to a URL, by signed requests; the secret is shown only in this answer."""
    body: CreateWebhook = call.body
    webhook = _outbox(call).subscribe(
        body.url,
        actions=body.actions,
        model_id=body.model_id,
        created_by=call.actor.name,
        now_us=to_micros(datetime.now(UTC)),
        allow_private=call.options.allow_private_webhooks,
    )
    return Reply(body=WebhookAnswer.of(webhook))


@OPERATIONS.declare("GET", _WEBHOOKS, Scope.ADMIN, answer=WebhookList)
def list_webhooks(call: Call) -> Reply:
    """List all webhooks, without their secrets."""
    items = [WebhookAnswer.of(each, secret=None) for each in _outbox(call).webhooks()]
    return Reply(body=WebhookList(items=items))


@OPERATIONS.declare("DELETE", _WEBHOOK, Scope.ADMIN, status=204)
def delete_webhook(call: Call) -> Reply:
    """Remove a webhook and the messages to it."""
    _outbox(call).unsubscribe(_webhook_id(call))
    return Reply()


@OPERATIONS.declare(
    "GET", f"{_WEBHOOK}/deliveries", Scope.ADMIN, query=LimitQuery, answer=DeliveryList
)
def list_deliveries(call: Call) -> Reply:
    """List the messages to a webhook and how their delivery went, the newest first."""
    found = _outbox(call).deliveries(_webhook_id(call), limit=call.query.page_size)
    return Reply(body=DeliveryList(items=[DeliveryAnswer.of(each) for each in found]))
