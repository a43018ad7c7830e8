"""Operations of the REST API: method, path, scope, types and answers of each, in one table.

The routes and the OpenAPI description are both made from this table, so they cannot disagree.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from tensorforge.errors import InvalidInputError, PermissionDeniedError
from tensorforge.registry.database.writes.idempotency import RequestKey
from tensorforge.registry.domain.models import Actor
from tensorforge.registry.domain.names import check_name
from tensorforge.registry.domain.versions import ModelVersion, require_version
from tensorforge.registry.model_registry import ModelRegistry
from tensorforge.registry.service.error_responses import PreconditionRequired
from tensorforge.registry.service.service_options import ServiceOptions
from tensorforge.registry.service.shared_wire import Answer, Nothing, WireRequest
from tensorforge.registry.tokens import Scope, allows, granted
from tensorforge.security import TokenRecord
from tensorforge.typed_json import convert_typed, decode_typed

ALWAYS_POSSIBLE = (400, 401, 403, 414, 429, 503)
"""The errors that any operation may answer: bad input, no token, no scope, URL too long, too many requests, no
database."""

Kind = TypeVar("Kind")

_ETAG = re.compile(r'"(\d{1,18})"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, decoded: its path, query, body and headers, and the token of its caller."""

    registry: ModelRegistry
    principal: TokenRecord
    path: Mapping[str, str] = field(default_factory=dict)
    query: Any = None
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    prepared: Any = None
    options: ServiceOptions = field(default_factory=ServiceOptions)

    @property
    def actor(self) -> Actor:
        """The caller, by the name of its token and the scopes that it has for the model of the call."""
        name = self.path.get("model_id", getattr(self.body, "name", None))
        return Actor(name=self.principal.name, scopes=granted(self.principal.scopes, name))

    def alias_rule(self, alias: str) -> dict[str, bool]:
        """The arguments `protected` and `force` with which the caller may set an alias.

        `PermissionDeniedError` if the alias is protected and the caller may not make transitions.
        """
        if alias.lower() not in self.options.protected_aliases:
            return {"protected": False, "force": False}
        actor = self.actor
        if Scope.TRANSITION.value not in actor.scopes:
            raise PermissionDeniedError(
                f"the alias {alias} is protected: {actor.name} needs {Scope.TRANSITION.value}"
            )
        return {"protected": True, "force": Scope.FORCE.value in actor.scopes}

    @property
    def model_id(self) -> str:
        """The model in the path."""
        return check_name("model_id", self.path["model_id"])

    @property
    def version(self) -> ModelVersion:
        """The version in the path."""
        return require_version(self.path["version"])

    @property
    def request_key(self) -> RequestKey | None:
        """The key in `Idempotency-Key`, or `None` if the caller sent none."""
        key = self.headers.get("idempotency-key")
        if key is None:
            return None
        if not 1 <= len(key) <= 200 or not key.isprintable():
            raise InvalidInputError("Idempotency-Key must have 1 to 200 printable characters")
        return RequestKey(caller=self.principal.token_id, key=key, digest=self.digest)

    def expected_revision(self) -> int | None:
        """The revision in `If-Match`, or `None` for `*`; `PreconditionRequired` if the header is missing."""
        value = self.headers.get("if-match")
        if value is None:
            raise PreconditionRequired(
                "If-Match is required: send the ETag that you got with the version, or *"
            )
        if value.strip() == "*":
            return None
        match = _ETAG.fullmatch(value.strip())
        if match is None:
            raise InvalidInputError(
                f"If-Match = {value[:60]!r}: must be the ETag of a version, or *"
            )
        return int(match[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an operation returns: a body, unless its status is 204, and the revision for the `ETag` header."""

    body: Answer | None = None
    etag: int | None = None


Run = Callable[[Call], Reply]
Declaration = Callable[[Run], Run]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. Each needs a scope, so none is open to everybody by omission.

    `errors` are the statuses that it may answer besides those that follow from the other fields. `quick` marks
    a read that finds single rows by their key.
    """

    name: str
    method: str
    path: str
    scope: Scope
    summary: str
    run: Run
    answer: type[Answer] | None = None
    status: int = 200
    query: type[WireRequest] = Nothing
    body: type[WireRequest] | None = None
    errors: tuple[int, ...] = ()
    if_match: bool = False
    idempotent: bool = False
    etag: bool = False
    quick: bool = False

    @property
    def path_parameters(self) -> tuple[str, ...]:
        """The names of the parameters in the path."""
        return tuple(re.findall(r"{(\w+)}", self.path))

    @property
    def changes(self) -> bool:
        """Whether the operation may change the registry."""
        return may_change(self.method, self.scope)

    def statuses(self) -> tuple[int, ...]:
        """Every status that the operation may answer."""
        more = {*self.errors, *ALWAYS_POSSIBLE}
        if self.path_parameters:
            more.add(404)
        if self.body is not None:
            more |= {413, 415}
        if self.if_match:
            more |= {412, 428}
        return (self.status, *sorted(more))


class OperationTable:
    """Operations in the order in which they were declared."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []

    def __iter__(self) -> Iterator[Operation]:
        return iter(self._operations)

    def declare(self, method: str, path: str, scope: Scope, **options: Any) -> Declaration:
        """A decorator that adds a function to the table.

        The function's name is the operation's name and its docstring the summary. `options` are the other
        fields of `Operation`.
        """

        def add(run: Run) -> Run:
            name, summary = run.__name__, run.__doc__ or ""
            self._operations.append(Operation(name, method, path, scope, summary, run, **options))
            return run

        return add


CREATES_ONCE: dict[str, Any] = {"status": 201, "errors": (409,), "idempotent": True}
"""The options of an operation that creates something, and that can be repeated safely under a key."""


def may_change(method: str, scope: Scope) -> bool:
    """Whether an operation may change the registry; a search that is sent as a POST does not."""
    return method != "GET" and scope is not Scope.READ


def require_scope(scope: Scope, principal: TokenRecord, model_id: str | None = None) -> None:
    """`PermissionDeniedError` unless the token has the scope for the model; without one, for all models."""
    if not allows(principal.scopes, scope, model_id):
        raise PermissionDeniedError(
            f"the token {principal.name!r} has {', '.join(principal.scopes)}; "
            f"this needs {scope.value}"
        )


def read_query(kind: type[Kind], parameters: Mapping[str, Any]) -> Kind:
    """The query parameters as a `kind`; `InvalidInputError` names one that is wrong or unknown."""
    try:
        return convert_typed(parameters, kind)
    except msgspec.ValidationError as error:
        raise InvalidInputError(f"query parameters: {error}") from error


def read_body(kind: type[Kind], body: bytes) -> Kind:
    """A JSON body as a `kind`; `InvalidInputError` says what is wrong and where."""
    try:
        return decode_typed(body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInputError(f"the body is not as expected: {error}") from error


def digest_of(method: str, path: str, body: bytes) -> str:
    """A digest that is equal exactly if two requests have the same method, path and body."""
    return hashlib.sha256(b"\x00".join([method.encode(), path.encode(), body])).hexdigest()


def phrase(status: int) -> str:
    """The name of an HTTP status."""
    return HTTPStatus(status).phrase
