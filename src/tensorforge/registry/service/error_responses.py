"""The answers to requests that fail: HTTP status, headers and body of each error.

Paths below MLflow's prefix get MLflow's error format, all others `ErrorAnswer`.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

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
from tensorforge.registry.service.mlflow import mlflow_wire
from tensorforge.registry.service.shared_wire import Answer, ErrorAnswer

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()

JSON = "application/json"


class TooManyRequests(CapacityError):  # noqa: N818  HTTP's name for it
    """The caller sent more requests than it may; the next one is allowed in `wait` seconds."""

    def __init__(self, wait: float) -> None:
        super().__init__(
            f"too many requests; try again in {wait:.3f} seconds", requested=1, available=0
        )
        self.wait = wait


class UnsupportedBodyError(InvalidInputError):
    """The body is in another format than JSON."""


class UrlTooLongError(InvalidInputError):
    """The URL is longer than the service allows."""


class PreconditionRequired(InvalidInputError):  # noqa: N818  HTTP's name for it
    """The header `If-Match`, which protects against lost updates, is missing."""


# Subclasses come before their base classes: the first class that fits decides.
_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (PreconditionRequired, 428),
    (UrlTooLongError, 414),
    (UnsupportedBodyError, 415),
    (InvalidInputError, 400),
    (NotFoundError, 404),
    (LostRaceError, 412),
    (ConflictError, 409),
    (AuthenticationError, 401),
    (PermissionDeniedError, 403),
    (TooManyRequests, 429),
    (CapacityError, 413),
    (UnavailableError, 503),
)


def status_of(error: Exception) -> int:
    """The HTTP status of an error; 500 for one that the service does not expect."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def json_response(
    status: int, body: Answer | dict[str, Any], headers: dict[str, str] | None = None
) -> Response:
    """A response with a JSON body."""
    return Response(_encoder.encode(body), status, headers, JSON)


def failure(request: Request, error: Exception) -> Response:
    """The response to a request that raised `error`. An unexpected error is logged and shows no details."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=400)
    status, headers = status_of(error), {}
    if isinstance(error, TooManyRequests):
        headers["Retry-After"] = str(max(1, round(error.wait)))
    elif status == 503:
        headers["Retry-After"] = "1"
    elif status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    elif status == 500:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    answer = ErrorAnswer(error="InternalError", message="an unexpected error; see the log")
    if isinstance(error, TensorForgeError):
        answer = ErrorAnswer(error=type(error).__name__, message=str(error))
    if _asks_mlflow(request):
        return json_response(status, mlflow_wire.error_body(status, error, answer), headers)
    return json_response(status, answer, headers)


def http_exception(request: Request, error: Exception) -> Response:
    """The response where the router found no such path, or not with this method."""
    assert isinstance(error, HTTPException)  # noqa: S101  registered for nothing else
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    headers = dict(error.headers or {})
    if _asks_mlflow(request):
        body = {"error_code": "ENDPOINT_NOT_FOUND", "message": message}
        return json_response(error.status_code, body, headers)
    answer = ErrorAnswer(error=error.detail.replace(" ", ""), message=message)
    return json_response(error.status_code, answer, headers)


def _asks_mlflow(request: Request) -> bool:
    return str(request.scope["path"]).startswith(mlflow_wire.PREFIX)
