"""MLflow's webhook operations, over the same outbox as the registry's own webhooks."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from tensorforge.errors import InvalidInputError, NotFoundError, TensorForgeError
from tensorforge.registry.database import mlflow_events
from tensorforge.registry.database.outbox import Outbox, Webhook, WebhookDraft
from tensorforge.registry.database.times import to_micros
from tensorforge.registry.service.mlflow.mlflow_wire import MlflowRequest
from tensorforge.registry.service.operations import Call
from tensorforge.registry.webhooks import WebhookRequest

Json = dict[str, Any]
_DEFAULT_PAGE, _LARGEST_PAGE = 100, 1_000


class Event(msgspec.Struct):
    """An event as MLflow writes it: `MODEL_VERSION` and `CREATED`."""

    entity: str = ""
    action: str = ""

    @property
    def name(self) -> str:
        """The event's name; `InvalidInputError` if the registry has no such event."""
        name = f"{self.entity}.{self.action}".lower()
        if name not in mlflow_events.EVENTS:
            known = ", ".join(mlflow_events.EVENTS)
            raise InvalidInputError(f"{name[:80]!r} is no event; these are: {known}")
        return name


class WebhookFields(MlflowRequest):
    """The fields of a webhook to create, or those to change."""

    name: str | None = None
    url: str | None = None
    events: list[Event] | None = None
    description: str | None = None
    secret: str | None = None
    status: str | None = None

    def draft(self) -> WebhookDraft:
        """The fields as a draft; `InvalidInputError` if the name or the URL is blank."""
        for field in ("name", "url"):
            value = getattr(self, field)
            if value is not None and not value.strip():
                raise InvalidInputError(f"Webhook {field} must not be empty")
        return WebhookDraft(
            name=None if self.name is None else self.name.strip(),
            url=None if self.url is None else self.url.strip(),
            events=[event.name for event in self.events] if self.events else None,
            description=self.description,
            secret=self.secret,
            status=self.status,
        )


class ListWebhooks(MlflowRequest):
    """A page of webhooks."""

    max_results: int | None = None
    page_token: str | None = None


class OneWebhook(MlflowRequest):
    """Nothing: the webhook is named by the path."""


class TryWebhook(MlflowRequest):
    """The event to test with; without it, the first one of the webhook."""

    event: Event | None = None


def _outbox(call: Call) -> Outbox:
    return Outbox(call.registry.database)


def _now_us() -> int:
    return to_micros(datetime.now(UTC))


def _find(call: Call) -> Webhook:
    text = call.path["webhook_id"]
    if text.isascii() and text.isdigit() and len(text) <= 16:
        found = next((h for h in _outbox(call).webhooks() if h.webhook_id == int(text)), None)
        if found is not None and found.events:
            return found
    raise NotFoundError(f"Webhook with ID {text[:80]} not found.")


def create_webhook(call: Call) -> Json:
    """`webhooks`, POST."""
    body: WebhookFields = call.body
    for field in ("name", "url", "events"):
        if not getattr(body, field):
            raise InvalidInputError(f"Webhook {field} must not be empty")
    made = _outbox(call).create(
        body.draft(),
        created_by=call.actor.name,
        now_us=_now_us(),
        allow_private=call.options.allow_private_webhooks,
    )
    return {"webhook": _body(made)}


def list_webhooks(call: Call) -> Json:
    """`webhooks`, GET."""
    body: ListWebhooks = call.body
    limit = _DEFAULT_PAGE if body.max_results is None else body.max_results
    if not 1 <= limit <= _LARGEST_PAGE:
        raise InvalidInputError(f"max_results must be between 1 and {_LARGEST_PAGE}, not {limit}")
    after = body.page_token or "0"
    if not (after.isascii() and after.isdigit() and len(after) <= 16):
        raise InvalidInputError("the page token was not made by this registry")
    found = [h for h in _outbox(call).webhooks() if h.events and h.webhook_id > int(after)]
    page: Json = {"webhooks": [_body(each) for each in found[:limit]]}
    if len(found) > limit:
        page["next_page_token"] = str(found[limit - 1].webhook_id)
    return page


def get_webhook(call: Call) -> Json:
    """`webhooks/{webhook_id}`, GET."""
    return {"webhook": _body(_find(call))}


def update_webhook(call: Call) -> Json:
    """`webhooks/{webhook_id}`, PATCH: fields that are left out stay as they are."""
    changed = _outbox(call).update(
        _find(call).webhook_id,
        call.body.draft(),
        now_us=_now_us(),
        allow_private=call.options.allow_private_webhooks,
    )
    return {"webhook": _body(changed)}


def delete_webhook(call: Call) -> Json:
    """`webhooks/{webhook_id}`, DELETE."""
    _outbox(call).unsubscribe(_find(call).webhook_id)
    return {}


def try_webhook(call: Call) -> Json:
    """`webhooks/{webhook_id}/test`: send an example at once; nothing of the answer's body is kept."""
    body: TryWebhook = call.body
    webhook = _find(call)
    event = webhook.events[0] if body.event is None else body.event.name
    now = datetime.now(UTC)
    message = mlflow_events.message(event, mlflow_events.example(event), now.isoformat())
    request = WebhookRequest(allow_private=call.options.allow_private_webhooks, clock=lambda: now)
    try:
        status = request.send(webhook, message, f"test-{to_micros(now)}")
    except TensorForgeError as error:
        return {"result": {"success": False, "error_message": str(error)}}
    result = {"success": 200 <= status < 300, "response_status": status, "response_body": ""}
    return {"result": result}


def _body(webhook: Webhook) -> Json:
    return {
        "webhook_id": str(webhook.webhook_id),
        "name": webhook.name,
        "url": webhook.url,
        "events": [_event(name) for name in webhook.events],
        "description": webhook.description,
        "status": webhook.status,
        "creation_timestamp": to_micros(webhook.created_at) // 1_000,
        "last_updated_timestamp": to_micros(webhook.updated_at or webhook.created_at) // 1_000,
    }


def _event(name: str) -> Json:
    entity, _, action = name.upper().partition(".")
    return {"entity": entity, "action": action}
