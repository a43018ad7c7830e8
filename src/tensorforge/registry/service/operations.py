"""An operation: its place, its permission, its types, and how its errors are answered.

One table of operations makes both the routes and the description of the service, so that neither can
say something that the other does not do.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from tensorforge.errors import (
    AuthenticationError,
    CapacityError,
    ConflictError,
    InvalidInputError,
    LostRaceError,
    NotFoundError,
    PermissionDeniedError,
    TensorForgeError,
    UnavailableError,
)
from tensorforge.registry.database.writes.idempotency import RequestKey
from tensorforge.registry.domain.models import Actor
from tensorforge.registry.domain.names import check_name
from tensorforge.registry.domain.versions import ModelVersion, require_version
from tensorforge.registry.model_registry import ModelRegistry
from tensorforge.registry.service.shared_wire import Answer, ErrorAnswer, Nothing, Request
from tensorforge.registry.tokens import Scope
from tensorforge.security import TokenRecord
from tensorforge.typed_json import convert_typed, decode_typed

ALWAYS_POSSIBLE = (400, 401, 403, 414, 429, 503)
"""What any operation may answer: bad input, no token, wrong scope, too long a URL, too many requests, no
database."""

Kind = TypeVar("Kind")

_ETAG = re.compile(r'"(\d{1,18})"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, read and checked as far as its types go."""

    registry: ModelRegistry
    principal: TokenRecord
    path: Mapping[str, str] = field(default_factory=dict)
    query: Any = None
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    allow_private_webhooks: bool = False

    @property
    def actor(self) -> Actor:
        """Whoever holds the token."""
        return Actor(name=self.principal.name, scopes=frozenset(self.principal.scopes))

    @property
    def model_id(self) -> str:
        """The model that the path names."""
        return check_name("model_id", self.path["model_id"])

    @property
    def version(self) -> ModelVersion:
        """The version that the path names."""
        return require_version(self.path["version"])

    @property
    def request_key(self) -> RequestKey | None:
        """The caller's key for this request, if it sent one."""
        key = self.headers.get("idempotency-key")
        if key is None:
            return None
        if not 1 <= len(key) <= 200 or not key.isprintable():
            raise InvalidInputError("Idempotency-Key must have 1 to 200 printable characters")
        return RequestKey(caller=self.principal.token_id, key=key, digest=self.digest)

    def expected_revision(self) -> int | None:
        """The revision in `If-Match`; `None` for `*`."""
        value = self.headers.get("if-match")
        if value is None:
            raise PreconditionRequired(
                "If-Match is required: send the ETag of the version that you looked at, or *"
            )
        if value.strip() == "*":
            return None
        match = _ETAG.fullmatch(value.strip())
        if match is None:
            raise InvalidInputError(f"If-Match = {value[:60]!r}: must be an ETag of ours, or *")
        return int(match[1])


class UrlTooLongError(InvalidInputError):
    """The URL is longer than the server reads."""


class PreconditionRequired(InvalidInputError):  # noqa: N818  HTTP's name for it
    """A header that protects against lost updates is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an operation answers."""

    body: Answer | None
    status: int = 200
    etag: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An entry of the table. There is none without a scope: nothing is open by omission.

    `quick` marks a read that finds single rows by their key.
    """

    name: str
    method: str
    path: str
    scope: Scope
    summary: str
    run: Callable[[Call], Reply]
    answer: type[Answer] | None
    status: int = 200
    query: type[Request] = Nothing
    body: type[Request] | None = None
    errors: tuple[int, ...] = ()
    if_match: bool = False
    idempotent: bool = False
    etag: bool = False
    quick: bool = False

    @property
    def path_parameters(self) -> tuple[str, ...]:
        """The names in the path."""
        return tuple(re.findall(r"{(\w+)}", self.path))

    @property
    def changes(self) -> bool:
        """Whether it may change something."""
        return may_change(self.method, self.scope)

    def statuses(self) -> tuple[int, ...]:
        """Everything that the operation may answer with."""
        more = {*self.errors, *ALWAYS_POSSIBLE}
        if self.path_parameters:
            more.add(404)
        if self.body is not None:
            more |= {413, 415}
        if self.if_match:
            more |= {412, 428}
        return (self.status, *sorted(more))


def may_change(method: str, scope: Scope) -> bool:
    """Whether an operation may change something; a search that is sent as a POST does not."""
    return method != "GET" and scope is not Scope.READ


def require_scope(scope: Scope, principal: TokenRecord) -> None:
    """Refuse whoever lacks a scope."""
    if scope.value not in principal.scopes:
        raise PermissionDeniedError(
            f"the token {principal.name!r} has {', '.join(principal.scopes)}; "
            f"this needs {scope.value}"
        )


def read_query(kind: type[Kind], parameters: Mapping[str, Any]) -> Kind:
    """Query parameters as a structure; a wrong or unknown one is an `InvalidInputError`."""
    try:
        return convert_typed(parameters, kind)
    except msgspec.ValidationError as error:
        raise InvalidInputError(f"query parameters: {error}") from error


def read_body(kind: type[Kind], body: bytes) -> Kind:
    """A JSON body as a structure; a wrong one is an `InvalidInputError` that names the place."""
    try:
        return decode_typed(body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInputError(f"the body is not as expected: {error}") from error


def digest_of(method: str, path: str, body: bytes) -> str:
    """What makes two requests the same one."""
    return hashlib.sha256(b"\x00".join([method.encode(), path.encode(), body])).hexdigest()


def status_of(error: Exception) -> int:
    """The status that an error is answered with."""
    match error:
        case PreconditionRequired():
            return 428
        case UrlTooLongError():
            return 414
        case InvalidInputError():
            return 400
        case NotFoundError():
            return 404
        case LostRaceError():
            return 412
        case ConflictError():
            return 409
        case AuthenticationError():
            return 401
        case PermissionDeniedError():
            return 403
        case CapacityError():
            return 413
        case UnavailableError():
            return 503
        case _:
            return 500


def error_answer(error: Exception) -> tuple[int, ErrorAnswer]:
    """The status and body that tell a caller what went wrong; what we did not expect tells nothing."""
    status = status_of(error)
    if not isinstance(error, TensorForgeError):
        return status, ErrorAnswer(
            error="InternalError", message="an unexpected error; see the log"
        )
    return status, ErrorAnswer(error=type(error).__name__, message=str(error))


def phrase(status: int) -> str:
    """What a status means, in HTTP's words."""
    return HTTPStatus(status).phrase
