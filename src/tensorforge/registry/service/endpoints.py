"""From an HTTP request to an operation and back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from starlette.requests import Request
from starlette.responses import Response

from tensorforge.errors import CapacityError, InvalidInputError
from tensorforge.registry.service.context import Service
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
    Reply,
    digest_of,
    read_body,
    read_query,
    require_scope,
)
from tensorforge.security import TokenRecord

Endpoint = Callable[[Request], Awaitable[Response]]
Endpoints = dict[tuple[str, str], Endpoint]
"""What answers, by method and path."""


def endpoints(service: Service, operations: Iterable[Operation]) -> Endpoints:
    """How each operation is answered."""
    return {
        (operation.method, operation.path): _endpoint(service, operation)
        for operation in operations
    }


def _endpoint(service: Service, operation: Operation) -> Endpoint:
    async def perform(request: Request) -> Response:
        return await _perform(service, operation, request)

    return counted(service, operation.name, perform)


def counted(service: Service, name: str, endpoint: Endpoint) -> Endpoint:
    """An endpoint whose answers, failures too, are counted and timed."""

    async def answer(request: Request) -> Response:
        started = service.monotonic()
        try:
            response = await endpoint(request)
        except Exception as error:  # noqa: BLE001  counted and answered, whatever it is
            response = failure(request, error)
        service.metrics.observe(name, response.status_code, service.monotonic() - started)
        return response

    return answer


async def _perform(service: Service, operation: Operation, request: Request) -> Response:
    principal: TokenRecord = request.scope["tensorforge.principal"]
    require_scope(operation.scope, principal)
    query = read_query(operation.query, _single(request))
    content = b""
    if operation.body is not None:
        content = await read_limited(request, service.limits)
    body = None if operation.body is None else read_body(operation.body, content)
    digest = digest_of(request.method, request.url.path, content) if operation.idempotent else ""
    call = service.call(request, principal, query=query, body=body, digest=digest)
    return await service.run(
        _answer, operation, call, quick=operation.quick, changes=operation.changes
    )


def _answer(operation: Operation, call: Call) -> Response:
    reply: Reply = operation.run(call)
    headers = {} if reply.etag is None else {"ETag": f'"{reply.etag}"'}
    if reply.body is None:
        return Response(status_code=reply.status, headers=headers)
    return json_response(reply.status, reply.body, headers)


def _single(request: Request) -> dict[str, str]:
    items = request.query_params.multi_items()
    found = dict(items)
    if len(found) != len(items):
        raise InvalidInputError("a query parameter comes twice")
    return found


async def read_limited(request: Request, limits: Limits) -> bytes:
    """The body, if it is JSON and not too long; what is too long is not read to its end."""
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
