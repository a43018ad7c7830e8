"""Endpoints: each decodes an HTTP request, runs its operation, and encodes the reply."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable

from starlette.requests import Request
from starlette.responses import Response

from tensorforge.errors import CapacityError, InvalidInputError
from tensorforge.registry.service.context import ServiceContext
from tensorforge.registry.service.error_responses import (
    JSON,
    UnsupportedBodyError,
    failure,
    json_response,
)
from tensorforge.registry.service.limits import Limits
from tensorforge.registry.service.operations import (
    Call,
    Operation,
    digest_of,
    read_body,
    read_query,
    require_scope,
)
from tensorforge.security import TokenRecord

Endpoint = Callable[[Request], Awaitable[Response]]
Endpoints = dict[tuple[str, str], Endpoint]
"""The endpoints by method and path."""


def endpoints(context: ServiceContext, operations: Iterable[Operation]) -> Endpoints:
    """The endpoints of these operations."""
    return {
        (each.method, each.path): measured(
            context, each.name, functools.partial(_perform, context, each)
        )
        for each in operations
    }


def measured(context: ServiceContext, name: str, endpoint: Endpoint) -> Endpoint:
    """An endpoint that also answers errors, and counts and times every answer."""

    async def answer(request: Request) -> Response:
        started = context.monotonic()
        try:
            response = await endpoint(request)
        except Exception as error:  # noqa: BLE001  every error gets an answer and is counted
            response = failure(request, error)
        context.metrics.observe(name, response.status_code, context.monotonic() - started)
        return response

    return answer


async def _perform(context: ServiceContext, operation: Operation, request: Request) -> Response:
    principal: TokenRecord = request.scope["tensorforge.principal"]
    query = read_query(operation.query, _query_parameters(request))
    content = b""
    if operation.body is not None:
        content = await read_limited(request, context.limits)
    body = None if operation.body is None else read_body(operation.body, content)
    model_id = request.path_params.get("model_id") or getattr(body, "model_id", "") or None
    require_scope(operation.scope, principal, model_id)
    digest = digest_of(request.method, request.url.path, content) if operation.idempotent else ""
    call = context.call(request, principal, query=query, body=body, digest=digest)
    return await context.run(
        _run, operation, call, quick=operation.quick, changes=operation.changes
    )


def _run(operation: Operation, call: Call) -> Response:
    reply = operation.run(call)
    headers = {} if reply.etag is None else {"ETag": f'"{reply.etag}"'}
    if reply.body is None:
        return Response(status_code=operation.status, headers=headers)
    return json_response(operation.status, reply.body, headers)


def _query_parameters(request: Request) -> dict[str, str]:
    items = request.query_params.multi_items()
    found = dict(items)
    if len(found) != len(items):
        raise InvalidInputError("a query parameter was sent twice")
    return found


async def read_limited(request: Request, limits: Limits) -> bytes:
    """The body of a request.

    `CapacityError` if it is longer than the limit, of which no more than the limit is read;
    `UnsupportedBodyError` if it is not JSON.
    """
    limit, declared = limits.body_bytes, request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared) > limit:
        raise _too_long(int(declared), limit)
    pieces, length = [], 0
    async for piece in request.stream():
        length += len(piece)
        if length > limit:
            raise _too_long(length, limit)
        pieces.append(piece)
    if length and request.headers.get("content-type", JSON).split(";")[0].strip() != JSON:
        raise UnsupportedBodyError("the body must be application/json")
    return b"".join(pieces)


def _too_long(length: int, limit: int) -> CapacityError:
    return CapacityError(
        f"the body has {length} bytes, at most {limit} are allowed",
        requested=length,
        available=limit,
    )
