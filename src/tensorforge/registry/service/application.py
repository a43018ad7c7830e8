"""The ASGI application: who may come in, how much they may ask for, and where to."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tensorforge.errors import AuthenticationError, CapacityError, InvalidInputError
from tensorforge.registry.limits import Limits, RateLimiter
from tensorforge.registry.outbox import Outbox
from tensorforge.registry.registry import ModelRegistry
from tensorforge.registry.service import admin_api, mlflow_api, models_api, versions_api
from tensorforge.registry.service.openapi import describe
from tensorforge.registry.service.operations import (
    Call,
    Operation,
    Reply,
    digest_of,
    error_answer,
    read_body,
    read_query,
)
from tensorforge.registry.service.wire import Answer, ErrorAnswer, HealthAnswer
from tensorforge.registry.tokens import DatabaseTokens
from tensorforge.registry.tokens import Scope as TokenScope
from tensorforge.registry.webhooks import WebhookCourier
from tensorforge.security import TokenRecord

_log = logging.getLogger(__name__)

OPERATIONS = (*models_api.OPERATIONS, *versions_api.OPERATIONS, *admin_api.OPERATIONS)
PUBLIC = frozenset({"/healthz", "/openapi.json"})
"""The only paths that answer without a token."""

Result = TypeVar("Result")

_JSON = "application/json"
_encoder = msgspec.json.Encoder()


class _UnsupportedBodyError(InvalidInputError):
    """The body is in another format than JSON."""


class Service:
    """What all requests share."""

    def __init__(
        self,
        registry: ModelRegistry,
        *,
        limits: Limits | None = None,
        allow_private_webhooks: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.tokens = DatabaseTokens(registry.database)
        self.limits = limits or Limits()
        self.limiter = RateLimiter(self.limits.rate, self.limits.burst)
        self.allow_private_webhooks = allow_private_webhooks
        self.monotonic = monotonic
        self.metrics = CollectorRegistry()
        self.requests = Counter(
            "tensorforge_registry_requests",
            "Requests by operation and status.",
            ["operation", "status"],
            registry=self.metrics,
        )
        self.seconds = Histogram(
            "tensorforge_registry_request_seconds",
            "Time to answer, by operation.",
            ["operation"],
            registry=self.metrics,
        )
        self.waiting = Gauge(
            "tensorforge_registry_webhooks_waiting",
            "Messages to webhooks that are not delivered yet.",
            registry=self.metrics,
        )
        self.description = _encoder.encode(describe(OPERATIONS))

    async def run(
        self, operation: Callable[[Call], Result], call: Call, *, quick: bool = False
    ) -> Result:
        """Run an operation beside the event loop, or within it where that cannot hold others up.

        A point read from SQLite waits for no lock and takes less time than handing it to a thread does.
        """
        if quick and self.registry.database.is_sqlite:
            return operation(call)
        return await run_in_threadpool(operation, call)

    def call(
        self,
        request: Request,
        principal: TokenRecord,
        *,
        query: Any = None,
        body: Any = None,
        digest: str = "",
    ) -> Call:
        """A request as the operations see it."""
        return Call(
            registry=self.registry,
            principal=principal,
            path=request.path_params,
            query=query,
            body=body,
            headers=request.headers,
            digest=digest,
            allow_private_webhooks=self.allow_private_webhooks,
        )


def build(
    registry: ModelRegistry,
    *,
    limits: Limits | None = None,
    allow_private_webhooks: bool = False,
    deliver_webhooks: bool = True,
    more_routes: Iterable[BaseRoute] = (),
) -> Starlette:
    """The application over a registry, which stays the caller's to close.

    `more_routes` are served beside the registry's, behind the same tokens and limits.
    """
    service = Service(registry, limits=limits, allow_private_webhooks=allow_private_webhooks)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        if not deliver_webhooks:
            yield
            return
        courier = WebhookCourier(registry.database, allow_private=allow_private_webhooks).start()
        try:
            yield
        finally:
            await run_in_threadpool(courier.close)

    routes: list[BaseRoute] = [
        *_rest_routes(service),
        *mlflow_api.routes(service, _read_limited),
        Route("/healthz", _healthz(service), methods=["GET"]),
        Route("/openapi.json", _description(service), methods=["GET"]),
        Route("/metrics", _metrics(service), methods=["GET"]),
        *more_routes,
    ]
    app = Starlette(
        routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _http_exception}
    )
    app.router.redirect_slashes = False
    app.add_middleware(Guard, service=service)
    return app


class Guard:
    """Stands before everything: no path is open unless it is listed as public.

    What fails is answered here, in the format of the part of the API that was asked.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it with what is wrong."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            self._check_size(request)
            if scope["path"] not in PUBLIC:
                principal = await self._authenticate(request)
                self._limit(principal)
                scope["tensorforge.principal"] = principal
            await self._app(scope, receive, send)
        except Exception as error:  # noqa: BLE001  the last line: every failure must have an answer
            await _failure(request, error)(scope, receive, send)

    def _check_size(self, request: Request) -> None:
        limits = self._service.limits
        length = len(request.scope.get("raw_path") or b"") + len(request.scope["query_string"])
        if length > limits.url_bytes:
            raise InvalidInputError(f"the URL has {length} bytes, at most {limits.url_bytes}")
        headers = sum(len(name) + len(value) for name, value in request.scope["headers"])
        if headers > limits.header_bytes:
            raise InvalidInputError(
                f"the headers have {headers} bytes, at most {limits.header_bytes}"
            )

    async def _authenticate(self, request: Request) -> TokenRecord:
        header = request.headers.get("authorization", "")
        kind, _, token = header.partition(" ")
        if kind.lower() != "bearer" or not token.strip():
            raise AuthenticationError("send a token: Authorization: Bearer tf_...")
        tokens = self._service.tokens
        known = tokens.authenticate_known(token.strip())
        if known is not None:
            return known
        return await run_in_threadpool(tokens.authenticate, token.strip())

    def _limit(self, principal: TokenRecord) -> None:
        wait = self._service.limiter.wait_for(principal.token_id, self._service.monotonic())
        if wait > 0:
            raise TooManyRequests(wait)


class TooManyRequests(CapacityError):  # noqa: N818  HTTP's name for it
    """The caller asks faster than it may."""

    def __init__(self, wait: float) -> None:
        super().__init__(
            f"too many requests; try again in {wait:.3f} seconds", requested=1, available=0
        )
        self.wait = wait


def _failure(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=400)
    status, answer = error_answer(error)
    headers = {}
    if isinstance(error, TooManyRequests):
        status, headers["Retry-After"] = 429, str(max(1, round(error.wait)))
    elif isinstance(error, _UnsupportedBodyError):
        status = 415
    elif status == 503:
        headers["Retry-After"] = "1"
    elif status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    elif status == 500:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    if request.scope["path"].startswith(mlflow_api.PREFIX):
        return _json(status, mlflow_api.error_body(status, error, answer), headers)
    return _json(status, answer, headers)


def _http_exception(request: Request, error: Exception) -> Response:
    """What the router itself refuses: no such path, or not with this method."""
    assert isinstance(error, HTTPException)  # noqa: S101  registered for nothing else
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    answer = ErrorAnswer(error=error.detail.replace(" ", ""), message=message)
    headers = dict(error.headers or {})
    if request.scope["path"].startswith(mlflow_api.PREFIX):
        body = {"error_code": "ENDPOINT_NOT_FOUND", "message": message}
        return _json(error.status_code, body, headers)
    return _json(error.status_code, answer, headers)


def _json(status: int, body: Answer | dict[str, Any], headers: dict[str, str]) -> Response:
    return Response(_encoder.encode(body), status, headers, _JSON)


async def _read_limited(request: Request, limit: int) -> bytes:
    """The body, if it is JSON and not too long; what is too long is not read to its end."""
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared) > limit:
        raise _too_long(int(declared), limit)
    pieces, length = [], 0
    async for piece in request.stream():
        length += len(piece)
        if length > limit:
            raise _too_long(length, limit)
        pieces.append(piece)
    if length and request.headers.get("content-type", _JSON).split(";")[0].strip() != _JSON:
        raise _UnsupportedBodyError("the body must be application/json")
    return b"".join(pieces)


def _too_long(length: int, limit: int) -> CapacityError:
    return CapacityError(
        f"the body has {length} bytes, at most {limit} are allowed",
        requested=length,
        available=limit,
    )


Endpoint = Callable[[Request], Awaitable[Response]]


def _rest_routes(service: Service) -> list[Route]:
    by_path: dict[str, dict[str, Operation]] = {}
    for operation in OPERATIONS:
        by_path.setdefault(operation.path, {})[operation.method] = operation
    return [
        Route(path, _dispatch(service, methods), methods=list(methods))
        for path, methods in by_path.items()
    ]


def _dispatch(service: Service, methods: dict[str, Operation]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        # The framework answers HEAD where there is a GET.
        operation = methods[request.method if request.method != "HEAD" else "GET"]
        started = service.monotonic()
        try:
            response = await _perform(service, operation, request)
        except Exception as error:  # noqa: BLE001  counted and answered, whatever it is
            response = _failure(request, error)
        service.requests.labels(operation.name, response.status_code).inc()
        service.seconds.labels(operation.name).observe(service.monotonic() - started)
        return response

    return endpoint


async def _perform(service: Service, operation: Operation, request: Request) -> Response:
    principal: TokenRecord = request.scope["tensorforge.principal"]
    operation.require_scope(principal)
    query = read_query(operation.query, _single(request))
    content = b""
    if operation.body is not None:
        content = await _read_limited(request, service.limits.body_bytes)
    body = None if operation.body is None else read_body(operation.body, content)
    digest = digest_of(request.method, request.url.path, content)
    call = service.call(request, principal, query=query, body=body, digest=digest)
    reply: Reply = await service.run(operation.run, call, quick=operation.quick)
    headers = {} if reply.etag is None else {"ETag": f'"{reply.etag}"'}
    if reply.body is None:
        return Response(status_code=reply.status, headers=headers)
    return _json(reply.status, reply.body, headers)


def _single(request: Request) -> dict[str, str]:
    items = request.query_params.multi_items()
    found = dict(items)
    if len(found) != len(items):
        raise InvalidInputError("a query parameter comes twice")
    return found


def _healthz(service: Service) -> Endpoint:
    async def healthz(_: Request) -> Response:
        def probe() -> None:
            with service.registry.database.read() as connection:
                connection.exec_driver_sql("SELECT 1")

        await run_in_threadpool(probe)
        return _json(200, HealthAnswer(status="ok"), {})

    return healthz


def _description(service: Service) -> Endpoint:
    async def description(_: Request) -> Response:
        return Response(service.description, media_type=_JSON)

    return description


def _metrics(service: Service) -> Endpoint:
    async def metrics(request: Request) -> Response:
        principal: TokenRecord = request.scope["tensorforge.principal"]
        if TokenScope.READ.value not in principal.scopes:
            raise HTTPException(403)
        outbox = Outbox(service.registry.database)
        service.waiting.set(await run_in_threadpool(outbox.waiting))
        return Response(generate_latest(service.metrics), media_type=CONTENT_TYPE_LATEST)

    return metrics
