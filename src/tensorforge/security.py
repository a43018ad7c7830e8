"""Bearer tokens with scopes: who calls, and what the caller may do.

A token is `tf_<id>_<secret>`. The id names the token's record and may be shown. The secret (256 random bits)
is shown once, when the token is issued, and stored only as a SHA-256 hash. A slow hash is not needed,
because nobody can guess 256 random bits.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from tensorforge.errors import (
    AuthenticationError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
)

_PREFIX = "tf"


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token as it is stored: everything but the secret."""

    token_id: str
    name: str
    secret_hash: str
    scopes: tuple[str, ...]
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None

    def problem(self, now: datetime) -> str | None:
        """Why the token is not valid at `now`, or `None` if it is."""
        if self.revoked_at is not None:
            return "was revoked"
        if self.expires_at is not None and now >= self.expires_at:
            return "has expired"
        return None


class TokenStore:
    """Issues, checks and revokes tokens. Safe to share between threads.

    A store that is made with the `records()` of another one accepts the same tokens.
    """

    def __init__(self, records: Iterable[TokenRecord] = ()) -> None:
        self._lock = threading.Lock()
        self._records = {record.token_id: record for record in records}

    def issue(
        self,
        name: str,
        scopes: Iterable[str],
        *,
        lifetime: timedelta | None = None,
        now: datetime | None = None,
    ) -> str:
        """Make a token for `name` and return it. The store cannot show it again."""
        granted = tuple(sorted(set(scopes)))
        if not name or not granted or not all(granted):
            raise InvalidInputError(
                f"name = {name!r}, scopes = {granted!r}: a token needs a name and a scope"
            )
        if lifetime is not None and lifetime <= timedelta(0):
            raise InvalidInputError(f"lifetime = {lifetime}: must be positive, or None")
        created = now or datetime.now(UTC)
        token_id, secret = secrets.token_hex(8), secrets.token_hex(32)
        record = TokenRecord(
            token_id=token_id,
            name=name,
            secret_hash=_digest(secret),
            scopes=granted,
            created_at=created,
            expires_at=None if lifetime is None else created + lifetime,
        )
        with self._lock:
            self._records[token_id] = record
        return f"{_PREFIX}_{token_id}_{secret}"

    def adopt(self, token: str, name: str, scopes: Iterable[str]) -> TokenRecord:
        """Accept a token that another store issued; a server that starts again does so with its own."""
        token_id, secret = _split(token.strip())
        granted = tuple(sorted(set(scopes)))
        if not token_id or not secret or not granted:
            raise InvalidInputError(f"the token for {name!r} is not of the form tf_<id>_<secret>")
        record = TokenRecord(
            token_id=token_id,
            name=name,
            secret_hash=_digest(secret),
            scopes=granted,
            created_at=datetime.now(UTC),
        )
        with self._lock:
            self._records[token_id] = record
        return record

    def authenticate(self, token: str, *, now: datetime | None = None) -> TokenRecord:
        """The record of a valid token; otherwise `AuthenticationError`.

        An unknown id and a wrong secret give the same message after the same comparison, so that neither
        the message nor the time tells a stranger which ids exist.
        """
        token_id, secret = _split(token)
        with self._lock:
            record = self._records.get(token_id)
        expected = record.secret_hash if record else _digest("")
        matches = hmac.compare_digest(_digest(secret), expected)
        if record is None or not matches:
            raise AuthenticationError("the token is not known here")
        problem = record.problem(now or datetime.now(UTC))
        if problem:
            raise AuthenticationError(f"the token {record.name!r} ({record.token_id}) {problem}")
        return record

    def authorize(self, token: str, scope: str, *, now: datetime | None = None) -> TokenRecord:
        """The record of a valid token with `scope`; without the scope `PermissionDeniedError`."""
        record = self.authenticate(token, now=now)
        if scope not in record.scopes:
            raise PermissionDeniedError(
                f"the token {record.name!r} has {', '.join(record.scopes)}; this needs {scope}"
            )
        return record

    def find(self, token_id: str) -> TokenRecord | None:
        """The record with this id, whether the token is valid or not; `None` if there is none."""
        with self._lock:
            return self._records.get(token_id)

    def revoke(self, token_id: str, *, now: datetime | None = None) -> TokenRecord:
        """Make a token invalid for ever; a second call changes nothing."""
        with self._lock:
            record = self._records.get(token_id)
            if record is None:
                raise NotFoundError(f"no token has the id {token_id!r}")
            if record.revoked_at is None:
                record = replace(record, revoked_at=now or datetime.now(UTC))
                self._records[token_id] = record
            return record

    def records(self) -> tuple[TokenRecord, ...]:
        """All records, oldest first."""
        with self._lock:
            return tuple(sorted(self._records.values(), key=lambda r: (r.created_at, r.token_id)))


def _split(token: str) -> tuple[str, str]:
    prefix, _, rest = token.partition("_")
    token_id, _, secret = rest.partition("_")
    return (token_id, secret) if prefix == _PREFIX else ("", "")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
