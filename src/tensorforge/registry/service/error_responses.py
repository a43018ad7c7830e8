"""What a caller gets when something went wrong, in the format of the part of the API that was asked."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tensorforge.errors import CapacityError, InvalidInputError
from tensorforge.registry.service.mlflow import mlflow_wire
from tensorforge.registry.service.operations import error_answer
from tensorforge.registry.service.shared_wire import Answer, ErrorAnswer

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()

JSON = "application/json"


class TooManyRequests(CapacityError):  # noqa: N818  HTTP's name for it
    """The caller asks faster than it may."""

    def __init__(self, wait: float) -> None:
        super().__init__(
            f"too many requests; try again in {wait:.3f} seconds", requested=1, available=0
        )
        self.wait = wait


class UnsupportedBodyError(InvalidInputError):
    """The body is in another format than JSON."""


def json_response(
    status: int, body: Answer | dict[str, Any], headers: dict[str, str] | None = None
) -> Response:
    """An answer as JSON."""
    return Response(_encoder.encode(body), status, headers, JSON)


def failure(request: Request, error: Exception) -> Response:
    """The answer to a request that raised."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=400)
    status, answer = error_answer(error)
    headers = {}
    if isinstance(error, TooManyRequests):
        status, headers["Retry-After"] = 429, str(max(1, round(error.wait)))
    elif isinstance(error, UnsupportedBodyError):
        status = 415
    elif status == 503:
        headers["Retry-After"] = "1"
    elif status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    elif status == 500:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    if _asks_mlflow(request):
        return json_response(status, mlflow_wire.error_body(status, error, answer), headers)
    return json_response(status, answer, headers)


def http_exception(request: Request, error: Exception) -> Response:
    """What the router itself refuses: no such path, or not with this method."""
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
