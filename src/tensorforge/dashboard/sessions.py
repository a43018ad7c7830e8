"""Who looks at the pages: a token is entered once, then a signed cookie names it."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from tensorforge.errors import AuthenticationError, PermissionDeniedError
from tensorforge.security import TokenRecord

COOKIE = "tensorforge_session"
SESSION_SECONDS = 12 * 3600
OBSERVE = "observe"
"""See runs, their logs and checkpoints."""
CONTROL = "control"
"""Scale, remove and stop; verify checkpoints; ask for stacks."""


class Tokens(Protocol):
    """A store of tokens, in memory or in the registry's database."""

    def authenticate(self, token: str) -> TokenRecord:
        """The record of a valid token; `AuthenticationError` for any other."""

    def find(self, token_id: str) -> TokenRecord | None:
        """The record with this id, valid or not."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """A person with a valid session: the token's name and scopes, and the secret that the forms carry."""

    name: str
    scopes: frozenset[str]
    csrf: str

    def may(self, scope: str) -> bool:
        """Whether the token has this scope."""
        return scope in self.scopes

    def require(self, scope: str) -> None:
        """Raise `PermissionDeniedError` if the token lacks the scope."""
        if scope not in self.scopes:
            has = ", ".join(sorted(self.scopes))
            raise PermissionDeniedError(f"the token {self.name!r} has {has}; this needs {scope}")


class Sessions:
    """Makes and checks sessions. Nothing is stored: a cookie is valid while its token is, up to twelve hours.

    The cookie has the token's id, when the session ends, and a signature over both and over the stored hash of
    the token's secret. So a revoked token ends its sessions, and no cookie contains a token. Servers with
    the same `key` accept each other's sessions.
    """

    def __init__(
        self, key: bytes, stores: Sequence[Tokens], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._key = key
        self._stores = tuple(stores)
        self._clock = clock

    def sign_in(self, token: str) -> str:
        """The cookie for a valid token; otherwise `AuthenticationError`."""
        problem: AuthenticationError | None = None
        for store in self._stores:
            try:
                record = store.authenticate(token.strip())
            except AuthenticationError as error:
                problem = error
            else:
                ends = int(self._clock()) + SESSION_SECONDS
                return f"{record.token_id}.{ends}.{self._sign(record, ends)}"
        raise problem or AuthenticationError("the token is not known here")

    def visitor(self, cookie: str) -> Visitor | None:
        """The visitor whom a cookie names; `None` if it is forged or over, or its token is not valid."""
        token_id, _, rest = cookie.partition(".")
        ends, _, signature = rest.partition(".")
        if not ends.isdecimal() or int(ends) < self._clock():
            return None
        for store in self._stores:
            record = store.find(token_id)
            if record is None or record.problem(datetime.now(UTC)) is not None:
                continue
            if hmac.compare_digest(signature.encode(), self._sign(record, int(ends)).encode()):
                return Visitor(record.name, frozenset(record.scopes), self._mac("csrf", cookie))
        return None

    def _sign(self, record: TokenRecord, ends: int) -> str:
        return self._mac("session", record.token_id, str(ends), record.secret_hash)

    def _mac(self, *parts: str) -> str:
        return hmac.new(self._key, "\n".join(parts).encode(), hashlib.sha256).hexdigest()


def is_csrf_valid(visitor: Visitor, given: str) -> bool:
    """Whether a form came from a page of this session."""
    return hmac.compare_digest(visitor.csrf.encode(), given.encode())
