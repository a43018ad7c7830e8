"""Webhooks, and the messages to be delivered to them.

A message is written in the transaction of the change that it reports: it exists if and only if that change was
committed. It is delivered at least once. A process claims a message for a limited time; if the process dies,
another one claims the message after that time. Each webhook has a queue of its own: messages to one webhook
never wait for another one.
"""

from __future__ import annotations

import functools
import json
import secrets
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tensorforge.errors import CapacityError, InvalidInputError, NotFoundError
from tensorforge.registry.addresses import check_target
from tensorforge.registry.database import mlflow_events
from tensorforge.registry.database.tables import OUTBOX, WEBHOOKS
from tensorforge.registry.database.times import from_micros
from tensorforge.registry.domain.names import check_name, check_text
from tensorforge.registry.secret_encryption import SecretCipher
from tensorforge.storage.database import Database
from tensorforge.storage.prepared import Prepared

ACTIONS = frozenset(
    {
        *("create_model", "rename_model", "delete_model", "set_sla", "register", "delete_version"),
        *("validate", "transition", "rollback", "set_alias", "delete_alias"),
        *("set_tags", "describe", "sign", "stage_move"),
    }
)
MAX_WEBHOOKS = 100
_HOOKS_FOR_MODEL = Prepared(
    sa.select(WEBHOOKS).where(
        WEBHOOKS.c.status == "ACTIVE",
        sa.or_(WEBHOOKS.c.model_id == "", WEBHOOKS.c.model_id == sa.bindparam("model_id")),
    )
)
_NEW_WEBHOOK = dict.fromkeys(("actions", "model_id", "name", "description", "events", "secret"), "")
_CIPHERS: weakref.WeakKeyDictionary[Database, SecretCipher] = weakref.WeakKeyDictionary()
_KEPT_US = 7 * 24 * 3600 * 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A URL to which changes are reported.

    Without `actions` every kind of change is reported, without `model_id` those of every model. A webhook with
    `events` gets MLflow's messages about these events, signed as MLflow does. A `DISABLED` webhook gets none.
    """

    webhook_id: int
    url: str
    secret: str
    model_id: str
    actions: tuple[str, ...]
    created_at: datetime
    created_by: str
    name: str = ""
    description: str = ""
    events: tuple[str, ...] = ()
    status: str = "ACTIVE"
    updated_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookDraft:
    """A webhook to create, or a change of one; in a change, what is `None` stays as it is."""

    url: str | None = None
    actions: Sequence[str] | None = None
    model_id: str | None = None
    name: str | None = None
    description: str | None = None
    events: Sequence[str] | None = None
    status: str | None = None
    secret: str | None = None

    def check(self, *, allow_private: bool) -> None:
        """`InvalidInputError` if a field is wrong, `PermissionDeniedError` for a URL in a private network."""
        if self.url is not None:
            check_target(self.url, allow_private=allow_private)
        if self.model_id:
            check_name("model_id", self.model_id)
        check_text("name", self.name or "", limit=256)
        check_text("description", self.description or "", limit=1_000)
        check_text("secret", self.secret or "", limit=1_000)
        _refuse_unknown("action", self.actions or (), ACTIONS)
        _refuse_unknown("event", self.events or (), frozenset(mlflow_events.EVENTS))
        _refuse_unknown("status", [self.status or "ACTIVE"], frozenset({"ACTIVE", "DISABLED"}))

    def columns(self, cipher: SecretCipher) -> dict[str, Any]:
        """The columns of the webhook's row that the draft sets."""
        values: dict[str, Any] = {
            "url": self.url,
            "actions": None if self.actions is None else " ".join(sorted(set(self.actions))),
            "model_id": self.model_id,
            "name": self.name,
            "description": self.description,
            "events": None if self.events is None else " ".join(dict.fromkeys(self.events)),
            "status": self.status,
            "secret": None if self.secret is None else cipher.encrypt(self.secret),
        }
        return {name: value for name, value in values.items() if value is not None}


def _refuse_unknown(what: str, given: Sequence[str], known: frozenset[str]) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise InvalidInputError(
            f"{unknown[0][:60]!r} is no {what}; these are: {', '.join(sorted(known))}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A message to one webhook: `status` is `pending`, `delivered` or `failed`."""

    delivery_id: int
    webhook_id: int
    sequence: int
    body: str
    attempts: int
    status: str
    due_at: datetime
    last_error: str


def enqueue(connection: sa.Connection, row: Mapping[str, Any]) -> None:
    """Write a message about an audit row for every webhook that subscribed to such changes."""
    hooks = _HOOKS_FOR_MODEL.all(connection, {"model_id": row["model_id"]})
    if not hooks:
        return
    evidence = json.loads(row["evidence"])
    bodies = [
        (hook["key"], body) for hook in hooks for body in _bodies(connection, hook, row, evidence)
    ]
    if bodies:
        connection.execute(OUTBOX.insert(), [_message(row, *each) for each in bodies])


def _bodies(
    connection: sa.Connection,
    hook: Mapping[str, Any],
    row: Mapping[str, Any],
    evidence: Mapping[str, Any],
) -> list[str]:
    """The bodies of the messages to one webhook about an audit row."""
    if hook["events"]:
        wanted = set(hook["events"].split())
        caused = mlflow_events.messages(connection, row, evidence)
        return [body for event, body in caused if event in wanted]
    if hook["actions"] and row["action"] not in hook["actions"].split():
        return []
    event = {name: value for name, value in row.items() if name not in ("model_key", "at_us")}
    event |= {"at": from_micros(row["at_us"]).isoformat(), "evidence": evidence}
    return [json.dumps(event)]


def _message(row: Mapping[str, Any], webhook_key: int, body: str) -> dict[str, Any]:
    return {
        "webhook_key": webhook_key,
        "sequence": row["sequence"],
        "body": body,
        "attempts": 0,
        "status": "pending",
        "due_us": row["at_us"],
        "last_error": "",
    }


class Outbox:
    """The webhooks of a registry and the messages to them. The webhooks' secrets are stored encrypted."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @functools.cached_property
    def _cipher(self) -> SecretCipher:
        if self._database not in _CIPHERS:
            _CIPHERS[self._database] = SecretCipher.for_database(self._database)
        return _CIPHERS[self._database]

    def subscribe(
        self,
        url: str,
        *,
        actions: Sequence[str] = (),
        model_id: str = "",
        created_by: str,
        now_us: int,
        allow_private: bool = False,
    ) -> Webhook:
        """Create a webhook with a new secret; changes from now on are reported to it.

        `InvalidInputError` if the URL or an action is none, `PermissionDeniedError` if the URL points inside a
        private network, `CapacityError` if there are 100 webhooks already.
        """
        draft = WebhookDraft(
            url=url, actions=actions, model_id=model_id, secret=secrets.token_hex(32)
        )
        return self.create(draft, created_by=created_by, now_us=now_us, allow_private=allow_private)

    def create(
        self, draft: WebhookDraft, *, created_by: str, now_us: int, allow_private: bool = False
    ) -> Webhook:
        """Create a webhook from a draft; raises like `subscribe`."""
        draft.check(allow_private=allow_private)
        if draft.url is None:
            raise InvalidInputError("a webhook needs a URL")
        values = _NEW_WEBHOOK | draft.columns(self._cipher)
        values |= {"created_us": now_us, "updated_us": now_us, "created_by": created_by}
        with self._database.write() as connection:
            count = connection.scalar(sa.select(sa.func.count()).select_from(WEBHOOKS)) or 0
            if count >= MAX_WEBHOOKS:
                raise CapacityError(f"there are {count} webhooks already", requested=1, available=0)
            key = connection.scalar(WEBHOOKS.insert().values(**values).returning(WEBHOOKS.c.key))
            row = connection.execute(sa.select(WEBHOOKS).where(WEBHOOKS.c.key == key)).mappings()
            return self._to_webhook(row.one())

    def update(
        self, webhook_id: int, draft: WebhookDraft, *, now_us: int, allow_private: bool = False
    ) -> Webhook:
        """Change a webhook; `NotFoundError` if there is none."""
        draft.check(allow_private=allow_private)
        values = draft.columns(self._cipher) | {"updated_us": now_us}
        mine = WEBHOOKS.c.key == webhook_id
        with self._database.write() as connection:
            connection.execute(WEBHOOKS.update().where(mine).values(**values))
            row = connection.execute(sa.select(WEBHOOKS).where(mine)).mappings().one_or_none()
        if row is None:
            raise NotFoundError(f"no webhook has the id {webhook_id}")
        return self._to_webhook(row)

    def webhooks(self) -> list[Webhook]:
        """All webhooks, the oldest first."""
        with self._database.read() as connection:
            rows = connection.execute(sa.select(WEBHOOKS).order_by(WEBHOOKS.c.key)).mappings()
            return [self._to_webhook(row) for row in rows]

    def get(self, webhook_id: int) -> Webhook:
        """One webhook; `NotFoundError` if there is none."""
        query = sa.select(WEBHOOKS).where(WEBHOOKS.c.key == webhook_id)
        with self._database.read() as connection:
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise NotFoundError(f"no webhook has the id {webhook_id}")
        return self._to_webhook(row)

    def _to_webhook(self, row: Mapping[Any, Any]) -> Webhook:
        return Webhook(
            webhook_id=row["key"],
            url=row["url"],
            secret=self._cipher.decrypt(row["secret"]),
            model_id=row["model_id"],
            actions=tuple(row["actions"].split()),
            created_at=from_micros(row["created_us"]),
            created_by=row["created_by"],
            name=row["name"],
            description=row["description"],
            events=tuple(row["events"].split()),
            status=row["status"],
            updated_at=from_micros(row["updated_us"] or row["created_us"]),
        )

    def unsubscribe(self, webhook_id: int) -> None:
        """Remove a webhook and its messages; `NotFoundError` if there is no such webhook."""
        with self._database.write() as connection:
            connection.execute(OUTBOX.delete().where(OUTBOX.c.webhook_key == webhook_id))
            gone = connection.execute(WEBHOOKS.delete().where(WEBHOOKS.c.key == webhook_id))
            if gone.rowcount != 1:
                raise NotFoundError(f"no webhook has the id {webhook_id}")

    def deliveries(self, webhook_id: int, *, limit: int = 100) -> list[Delivery]:
        """The messages for a webhook, the newest first."""
        self.get(webhook_id)
        query = sa.select(OUTBOX).where(OUTBOX.c.webhook_key == webhook_id)
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(OUTBOX.c.key.desc()).limit(limit)).mappings()
            return [_to_delivery(row) for row in rows]

    def queues_due(self, now_us: int) -> list[int]:
        """The ids of the webhooks to which a message is due."""
        query = (
            sa.select(OUTBOX.c.webhook_key)
            .where(OUTBOX.c.status == "pending", OUTBOX.c.due_us <= now_us)
            .distinct()
            .order_by(OUTBOX.c.webhook_key)
        )
        with self._database.read() as connection:
            return list(connection.scalars(query))

    def claim(
        self, now_us: int, *, claim_us: int, webhook_id: int, limit: int = 20
    ) -> list[Delivery]:
        """Take messages to one webhook that are due; no other process can claim them for `claim_us`."""
        query = (
            sa.select(OUTBOX)
            .where(
                OUTBOX.c.webhook_key == webhook_id,
                OUTBOX.c.status == "pending",
                OUTBOX.c.due_us <= now_us,
            )
            .order_by(OUTBOX.c.due_us, OUTBOX.c.key)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        with self._database.write() as connection:
            claimed = [_to_delivery(row) for row in connection.execute(query).mappings()]
            if claimed:
                mine = OUTBOX.c.key.in_([delivery.delivery_id for delivery in claimed])
                connection.execute(OUTBOX.update().where(mine).values(due_us=now_us + claim_us))
        return claimed

    def settle(
        self, delivery: Delivery, *, status: str, now_us: int, due_us: int = 0, error: str = ""
    ) -> None:
        """Store how a delivery attempt ended, and delete messages that were settled a week ago or earlier."""
        with self._database.write() as connection:
            connection.execute(
                OUTBOX.update()
                .where(OUTBOX.c.key == delivery.delivery_id)
                .values(
                    status=status,
                    attempts=delivery.attempts + 1,
                    due_us=due_us or now_us,
                    last_error=error[:500],
                )
            )
            connection.execute(
                OUTBOX.delete().where(
                    OUTBOX.c.status != "pending", OUTBOX.c.due_us < now_us - _KEPT_US
                )
            )

    def pending_count(self) -> int:
        """How many messages still have to be delivered."""
        query = sa.select(sa.func.count()).where(OUTBOX.c.status == "pending")
        with self._database.read() as connection:
            return connection.scalar(query) or 0


def _to_delivery(row: Mapping[Any, Any]) -> Delivery:
    return Delivery(
        delivery_id=row["key"],
        webhook_id=row["webhook_key"],
        sequence=row["sequence"],
        body=row["body"],
        attempts=row["attempts"],
        status=row["status"],
        due_at=from_micros(row["due_us"]),
        last_error=row["last_error"],
    )
