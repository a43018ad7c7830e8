"""Bearer tokens of the service, stored in the registry's database."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

import sqlalchemy as sa

from tensorforge.errors import InvalidInputError, NotFoundError
from tensorforge.registry.database.tables import TOKENS
from tensorforge.registry.database.times import from_micros, to_micros
from tensorforge.security import TokenRecord, TokenStore
from tensorforge.storage.database import Database

_CACHE_SIZE = 10_000


class Scope(Enum):
    """A permission that a token can have."""

    READ = "registry:read"
    """Read everything but tokens and secrets."""
    WRITE = "registry:write"
    """Register versions, record validations, set tags, aliases and descriptions."""
    TRANSITION = "registry:promote"
    """Make transitions along the lifecycle, and roll back."""
    FORCE = "registry:force"
    """Override missing evidence, with a reason."""
    ADMIN = "registry:admin"
    """Delete and rename, set SLAs, manage webhooks."""


def allows(scopes: Iterable[str], scope: Scope, model_id: str | None = None) -> bool:
    """Whether these scopes of a token include `scope` for a model; without a model, for all of them.

    `registry:promote:ranker*` includes `registry:promote` for the models whose names match `ranker*`.
    """
    for each in scopes:
        if each == scope.value:
            return True
        prefix, pattern = f"{scope.value}:", each.removeprefix(f"{scope.value}:")
        if model_id is not None and each.startswith(prefix) and fnmatchcase(model_id, pattern):
            return True
    return False


def granted(scopes: Iterable[str], model_id: str | None) -> frozenset[str]:
    """The scopes that a token has for a model, each without its pattern."""
    given = tuple(scopes)
    return frozenset(scope.value for scope in Scope if allows(given, scope, model_id))


def _check_scope(text: str) -> str:
    base = ":".join(text.split(":")[:2])
    known = [scope.value for scope in Scope]
    if base not in known or text.endswith(":") or any(c.isspace() for c in text):
        raise InvalidInputError(
            f"{text[:80]!r} is no scope; these are: {', '.join(known)}, each also for models whose names "
            "match a pattern, such as registry:promote:ranker*"
        )
    return text


class DatabaseTokens:
    """Issues, checks and revokes tokens. Threads may share it.

    A token that was found is looked up again only after `cache_seconds`. So if another process revokes a token,
    this one may accept it for that time.
    """

    def __init__(
        self,
        database: Database,
        *,
        cache_seconds: float = 2.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._cache_seconds = cache_seconds
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, tuple[float, TokenStore]] = OrderedDict()

    def issue(
        self,
        name: str,
        scopes: Iterable[str],
        *,
        lifetime: timedelta | None = None,
        now: datetime | None = None,
    ) -> str:
        """Create a token and return it. Only its hash is stored, so it cannot be shown again."""
        store = TokenStore()
        token = store.issue(name, map(_check_scope, scopes), lifetime=lifetime, now=now)
        (record,) = store.records()
        with self._database.write() as connection:
            connection.execute(TOKENS.insert().values(_to_row(record)))
        return token

    def authenticate(self, token: str, *, now: datetime | None = None) -> TokenRecord:
        """The record of a valid token; `AuthenticationError` for any other."""
        return self._store_for(token).authenticate(token, now=now)

    def authenticate_cached(self, token: str) -> TokenRecord | None:
        """Like `authenticate`, but without reading the database; `None` if the token is not cached."""
        store = self._cached(_id_of(token))
        return None if store is None else store.authenticate(token)

    def find(self, token_id: str) -> TokenRecord | None:
        """The record with this id, whether the token is valid or not; `None` if there is none."""
        cached = self._cached(token_id)
        if cached is not None:
            return cached.find(token_id)
        return next(iter(self._load(token_id)), None)

    def has_seen(self, token: str) -> bool:
        """Whether the token's id belongs to a token that was found here before."""
        with self._lock:
            return _id_of(token) in self._cache

    def _cached(self, token_id: str) -> TokenStore | None:
        with self._lock:
            cached = self._cache.get(token_id)
        if cached is None or self._monotonic() - cached[0] >= self._cache_seconds:
            return None
        return cached[1]

    def _store_for(self, token: str) -> TokenStore:
        token_id = _id_of(token)
        cached = self._cached(token_id)
        if cached is not None:
            return cached
        moment = self._monotonic()
        store = TokenStore(self._load(token_id))
        if store.records():
            with self._lock:
                self._cache[token_id] = (moment, store)
                while len(self._cache) > _CACHE_SIZE:
                    self._cache.popitem(last=False)
        return store

    def _load(self, token_id: str) -> list[TokenRecord]:
        # Every token id is ASCII letters and digits; PostgreSQL refuses some other texts with an error.
        if not (token_id.isascii() and token_id.isalnum()):
            return []
        with self._database.read() as connection:
            query = sa.select(TOKENS).where(TOKENS.c.token_id == token_id)
            row = connection.execute(query).mappings().one_or_none()
        return [] if row is None else [_to_record(row)]

    def revoke(self, token_id: str, *, now: datetime | None = None) -> TokenRecord:
        """Revoke a token and return its record.

        A second call changes nothing; `NotFoundError` if there is none.
        """
        moment = to_micros(now or datetime.now(UTC))
        with self._database.write() as connection:
            connection.execute(
                TOKENS.update()
                .where(TOKENS.c.token_id == token_id, TOKENS.c.revoked_us.is_(None))
                .values(revoked_us=moment)
            )
        with self._lock:
            self._cache.pop(token_id, None)
        found = self._load(token_id)
        if not found:
            raise NotFoundError(f"no token has the id {token_id[:60]!r}")
        return found[0]

    def records(self) -> tuple[TokenRecord, ...]:
        """The records of all tokens, the oldest first."""
        query = sa.select(TOKENS).order_by(TOKENS.c.created_us, TOKENS.c.token_id)
        with self._database.read() as connection:
            return tuple(_to_record(row) for row in connection.execute(query).mappings())


def _id_of(token: str) -> str:
    return token.split("_", 2)[1] if token.count("_") >= 2 else ""


def _to_row(record: TokenRecord) -> dict[str, Any]:
    return {
        "token_id": record.token_id,
        "name": record.name,
        "secret_hash": record.secret_hash,
        "scopes": " ".join(record.scopes),
        "created_us": to_micros(record.created_at),
        "expires_us": None if record.expires_at is None else to_micros(record.expires_at),
        "revoked_us": None if record.revoked_at is None else to_micros(record.revoked_at),
    }


def _to_record(row: Any) -> TokenRecord:
    return TokenRecord(
        token_id=row["token_id"],
        name=row["name"],
        secret_hash=row["secret_hash"],
        scopes=tuple(row["scopes"].split()),
        created_at=from_micros(row["created_us"]),
        expires_at=None if row["expires_us"] is None else from_micros(row["expires_us"]),
        revoked_at=None if row["revoked_us"] is None else from_micros(row["revoked_us"]),
    )
