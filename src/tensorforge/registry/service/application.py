"""The ASGI application: access control, limits and routes of the service."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import sqlalchemy as sa
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from tensorforge.errors import AuthenticationError, InvalidInputError
from tensorforge.registry.anchoring import AnchorSchedule
from tensorforge.registry.database.outbox import Outbox
from tensorforge.registry.database.tables import AUDIT_HEAD
from tensorforge.registry.model_registry import ModelRegistry
from tensorforge.registry.service import files_api
from tensorforge.registry.service.context import ServiceContext
from tensorforge.registry.service.endpoints import Endpoint, Endpoints, endpoints
from tensorforge.registry.service.error_responses import (
    JSON,
    TooManyRequests,
    UrlTooLongError,
    failure,
    http_exception,
    json_response,
)
from tensorforge.registry.service.limits import Limits
from tensorforge.registry.service.mlflow import mlflow_api
from tensorforge.registry.service.openapi import describe
from tensorforge.registry.service.operations import require_scope
from tensorforge.registry.service.rest import admin_api, models_api, versions_api
from tensorforge.registry.service.service_options import ServiceOptions
from tensorforge.registry.service.shared_wire import HealthAnswer
from tensorforge.registry.tokens import Scope
from tensorforge.registry.webhooks import WebhookSender
from tensorforge.security import TokenRecord
from tensorforge.storage.prepared import Prepared

OPERATIONS = (*models_api.OPERATIONS, *versions_api.OPERATIONS, *admin_api.OPERATIONS)
PUBLIC = frozenset({"/healthz", "/openapi.json"})
"""The paths that need no token; every other path does."""


def build(
    registry: ModelRegistry,
    *,
    limits: Limits | None = None,
    options: ServiceOptions | None = None,
    deliver_webhooks: bool = True,
    anchoring: AnchorSchedule | None = None,
    more_routes: Iterable[BaseRoute] = (),
) -> ASGIApp:
    """The application that serves a registry. It does not close the registry.

    `more_routes` are served too, with the same tokens and limits. `anchoring` notes audit heads meanwhile.
    """
    context = ServiceContext(registry, limits=limits, options=options)
    allow_private = context.options.allow_private_webhooks

    @asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        sender = None
        if deliver_webhooks:
            sender = WebhookSender(registry.database, allow_private=allow_private)
            sender.start()
        if anchoring is not None:
            anchoring.start()
        try:
            yield
        finally:
            if anchoring is not None:
                await context.run(anchoring.close)
            if sender is not None:
                await context.run(sender.close)
            context.close()

    table = endpoints(context, OPERATIONS) | mlflow_api.endpoints(context)
    table |= files_api.endpoints(context)
    table |= {
        ("GET", "/healthz"): _healthz(context),
        ("GET", "/openapi.json"): _description(),
        ("GET", "/metrics"): _metrics(context),
    }
    app = Starlette(
        routes=[*_routes(table), *more_routes],
        lifespan=lifespan,
        exception_handlers={HTTPException: http_exception},
    )
    app.router.redirect_slashes = False
    return AccessMiddleware(app, context, table)


def _routes(table: Endpoints) -> list[Route]:
    by_path: dict[str, dict[str, Endpoint]] = {}
    for (method, path), endpoint in table.items():
        by_path.setdefault(path, {})[method] = endpoint
    return [
        Route(path, _dispatch(methods), methods=list(methods)) for path, methods in by_path.items()
    ]


def _dispatch(methods: dict[str, Endpoint]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        # Starlette routes HEAD to every path that has GET.
        return await methods[request.method if request.method != "HEAD" else "GET"](request)

    return endpoint


class AccessMiddleware:
    """Checks size, token and rate of every request before it reaches an endpoint, and answers those that fail.

    A path without parameters is looked up in the table of endpoints. Only the others go through Starlette's
    router.
    """

    def __init__(self, app: ASGIApp, context: ServiceContext, table: Endpoints) -> None:
        self._app = app
        self._context = context
        self._table = table

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Pass a request on to its endpoint, or answer it with an error."""
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
            endpoint = self._table.get((scope["method"], scope["path"]))
            if endpoint is None:
                await self._app(scope, receive, send)
            else:
                await (await endpoint(request))(scope, receive, send)
        except Exception as error:  # noqa: BLE001  every request must get an answer
            await failure(request, error)(scope, receive, send)

    def _check_size(self, request: Request) -> None:
        limits = self._context.limits
        length = len(request.scope.get("raw_path") or b"") + len(request.scope["query_string"])
        if length > limits.url_bytes:
            raise UrlTooLongError(f"the URL has {length} bytes, at most {limits.url_bytes}")
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
        tokens, failures = self._context.tokens, self._context.failed_tokens
        address = request.client.host if request.client is not None else ""
        wait = failures.wait_for(address, self._context.monotonic())
        if wait > 0 and not tokens.has_seen(token.strip()):
            raise TooManyRequests(wait)
        try:
            known = tokens.authenticate_cached(token.strip())
            if known is None:
                known = await self._context.run(tokens.authenticate, token.strip())
                failures.succeeded(address)
        except AuthenticationError:
            failures.failed(address, self._context.monotonic())
            raise
        return known

    def _limit(self, principal: TokenRecord) -> None:
        wait = self._context.limiter.wait_for(principal.token_id, self._context.monotonic())
        if wait > 0:
            raise TooManyRequests(wait)


_ANY_ROW = Prepared(sa.select(AUDIT_HEAD.c.sequence))


def _healthz(context: ServiceContext) -> Endpoint:
    async def healthz(_: Request) -> Response:
        await context.run(context.registry.database.fetch, _ANY_ROW, {}, quick=True)
        return json_response(200, HealthAnswer(status="ok"))

    return healthz


def _description() -> Endpoint:
    described = msgspec.json.encode(describe(OPERATIONS))

    async def description(_: Request) -> Response:
        return Response(described, media_type=JSON)

    return description


def _metrics(context: ServiceContext) -> Endpoint:
    outbox = Outbox(context.registry.database)

    async def metrics(request: Request) -> Response:
        require_scope(Scope.READ, request.scope["tensorforge.principal"])
        pending = await context.run(outbox.pending_count)
        return Response(context.metrics.expose(pending=pending), media_type=CONTENT_TYPE_LATEST)

    return metrics
