"""Creates that can be repeated safely: the same request under the same key has one effect."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from tensorforge.errors import ConflictError
from tensorforge.registry.database.tables import IDEMPOTENCY
from tensorforge.registry.domain.versions import ModelVersion, require_version

KEPT_US = 24 * 3600 * 1_000_000
"""How long a key is remembered: a day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """A caller's key for one request, with a digest of what was requested."""

    caller: str
    key: str
    digest: str


def earlier_answer(
    connection: sa.Connection, request: RequestKey
) -> tuple[str, ModelVersion | None] | None:
    """What the same request created before; `ConflictError` if the key was used for another one."""
    query = sa.select(IDEMPOTENCY).where(
        IDEMPOTENCY.c.caller == request.caller, IDEMPOTENCY.c.request_key == request.key
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    if row.request_hash != request.digest:
        raise ConflictError(f"the key {request.key!r} was used before, for another request")
    return row.model_id, require_version(row.version) if row.version else None


def remember(
    connection: sa.Connection,
    request: RequestKey,
    model_id: str,
    version: ModelVersion | None,
    now_us: int,
) -> None:
    """Keep what a request created, in the same transaction, and forget keys that are a day old."""
    connection.execute(IDEMPOTENCY.delete().where(IDEMPOTENCY.c.created_us < now_us - KEPT_US))
    connection.execute(
        IDEMPOTENCY.insert().values(
            caller=request.caller,
            request_key=request.key,
            request_hash=request.digest,
            model_id=model_id,
            version="" if version is None else str(version),
            created_us=now_us,
        )
    )
