"""Creates that can be repeated safely: the same request under the same key is carried out once."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from tensorforge.errors import ConflictError
from tensorforge.registry.database.rows import find_version, to_metadata
from tensorforge.registry.database.tables import IDEMPOTENCY
from tensorforge.registry.database.writes.changes import Change
from tensorforge.registry.domain.models import ModelMetadata
from tensorforge.registry.domain.versions import ModelVersion, require_version

KEPT_US = 24 * 3600 * 1_000_000
"""How long a key is remembered: a day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """A key that a caller chose for one request, with a digest of the request."""

    caller: str
    key: str
    digest: str


def was_answered(connection: sa.Connection, request: RequestKey | None) -> bool:
    """Whether this request was carried out before; `ConflictError` if its key belongs to another request."""
    return _earlier(connection, request) is not None


def version_created_before(
    connection: sa.Connection, request: RequestKey | None
) -> ModelMetadata | None:
    """The version that this request created before, or `None` if the request is new.

    `ConflictError` if its key belongs to another request.
    """
    row = _earlier(connection, request)
    if row is None:
        return None
    if not row.version:
        raise ConflictError("this key was used before, to create a model")
    return to_metadata(find_version(connection, row.model_id, require_version(row.version)))


def _earlier(
    connection: sa.Connection, request: RequestKey | None
) -> sa.Row[tuple[str, ...]] | None:
    if request is None:
        return None
    query = sa.select(IDEMPOTENCY).where(
        IDEMPOTENCY.c.caller == request.caller, IDEMPOTENCY.c.request_key == request.key
    )
    row = connection.execute(query).one_or_none()
    if row is not None and row.request_hash != request.digest:
        raise ConflictError(f"the key {request.key!r} was used before, for another request")
    return row


def remember(change: Change, request: RequestKey | None, version: ModelVersion | None) -> None:
    """Store what a request created, in the same transaction, and delete keys that are older than a day."""
    if request is None:
        return
    expired = IDEMPOTENCY.c.created_us < change.now_us - KEPT_US
    change.connection.execute(IDEMPOTENCY.delete().where(expired))
    change.connection.execute(
        IDEMPOTENCY.insert().values(
            caller=request.caller,
            request_key=request.key,
            request_hash=request.digest,
            model_id=change.model_id,
            version="" if version is None else str(version),
            created_us=change.now_us,
        )
    )
