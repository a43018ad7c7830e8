"""Webhooks, and the messages to be delivered to them.

A message is written in the transaction of the change that it reports: it exists if and only if that change was
committed. It is delivered at least once. A process claims a message for a limited time; if the process dies,
another one claims the message after that time.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tensorforge.errors import CapacityError, InvalidInputError, NotFoundError
from tensorforge.registry.addresses import check_target
from tensorforge.registry.database.tables import OUTBOX, WEBHOOKS
from tensorforge.registry.database.times import from_micros
from tensorforge.registry.domain.names import check_name
from tensorforge.storage.database import Database
from tensorforge.storage.prepared import Prepared

ACTIONS = frozenset(
    {
        *("create_model", "rename_model", "delete_model", "set_sla", "register", "delete_version"),
        *("validate", "transition", "rollback", "set_alias", "delete_alias"),
        *("set_tags", "describe"),
    }
)
MAX_WEBHOOKS = 100
_HOOKS_FOR_MODEL = Prepared(
    sa.select(WEBHOOKS).where(
        sa.or_(WEBHOOKS.c.model_id == "", WEBHOOKS.c.model_id == sa.bindparam("model_id"))
    )
)
_KEPT_US = 7 * 24 * 3600 * 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A URL to which changes are reported.

    Without `actions` every kind of change is reported, without `model_id` those of every model.
    """

    webhook_id: int
    url: str
    secret: str
    model_id: str
    actions: tuple[str, ...]
    created_at: datetime
    created_by: str


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
    subscribed = [hook for hook in hooks if _includes(hook["actions"], row["action"])]
    if not subscribed:
        return
    event = {name: value for name, value in row.items() if name not in ("model_key", "at_us")}
    event |= {"at": from_micros(row["at_us"]).isoformat(), "evidence": json.loads(row["evidence"])}
    body = json.dumps(event)
    connection.execute(
        OUTBOX.insert(),
        [
            {
                "webhook_key": hook["key"],
                "sequence": row["sequence"],
                "body": body,
                "attempts": 0,
                "status": "pending",
                "due_us": row["at_us"],
                "last_error": "",
            }
            for hook in subscribed
        ],
    )


def _includes(actions: str, action: str) -> bool:
    return not actions or action in actions.split()


class Outbox:
    """The webhooks of a registry and the messages to them."""

    def __init__(self, database: Database) -> None:
        self._database = database

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
        check_target(url, allow_private=allow_private)
        if model_id:
            check_name("model_id", model_id)
        unknown = sorted(set(actions) - ACTIONS)
        if unknown:
            raise InvalidInputError(
                f"{unknown[0]!r} is no action; these are: {', '.join(sorted(ACTIONS))}"
            )
        with self._database.write() as connection:
            count = connection.scalar(sa.select(sa.func.count()).select_from(WEBHOOKS)) or 0
            if count >= MAX_WEBHOOKS:
                raise CapacityError(f"there are {count} webhooks already", requested=1, available=0)
            key = connection.scalar(
                WEBHOOKS.insert()
                .values(
                    url=url,
                    secret=secrets.token_hex(32),
                    actions=" ".join(sorted(set(actions))),
                    model_id=model_id,
                    created_us=now_us,
                    created_by=created_by,
                )
                .returning(WEBHOOKS.c.key)
            )
            row = connection.execute(sa.select(WEBHOOKS).where(WEBHOOKS.c.key == key)).mappings()
            return _to_webhook(row.one())

    def webhooks(self) -> list[Webhook]:
        """All webhooks, the oldest first."""
        with self._database.read() as connection:
            rows = connection.execute(sa.select(WEBHOOKS).order_by(WEBHOOKS.c.key)).mappings()
            return [_to_webhook(row) for row in rows]

    def get(self, webhook_id: int) -> Webhook:
        """One webhook; `NotFoundError` if there is none."""
        query = sa.select(WEBHOOKS).where(WEBHOOKS.c.key == webhook_id)
        with self._database.read() as connection:
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise NotFoundError(f"no webhook has the id {webhook_id}")
        return _to_webhook(row)

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

    def claim(self, now_us: int, *, claim_us: int, limit: int = 20) -> list[Delivery]:
        """Take messages that are due; no other process can claim them for `claim_us`."""
        query = (
            sa.select(OUTBOX)
            .where(OUTBOX.c.status == "pending", OUTBOX.c.due_us <= now_us)
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


def _to_webhook(row: Mapping[Any, Any]) -> Webhook:
    return Webhook(
        webhook_id=row["key"],
        url=row["url"],
        secret=row["secret"],
        model_id=row["model_id"],
        actions=tuple(row["actions"].split()),
        created_at=from_micros(row["created_us"]),
        created_by=row["created_by"],
    )


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
