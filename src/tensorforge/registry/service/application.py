"""The ASGI application: who may come in, how much they may ask for, and where to."""

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
from tensorforge.registry.database.outbox import Outbox
from tensorforge.registry.database.tables import AUDIT_HEAD
from tensorforge.registry.model_registry import ModelRegistry
from tensorforge.registry.service.context import Service
from tensorforge.registry.service.endpoints import Endpoint, Endpoints, endpoints
from tensorforge.registry.service.error_responses import (
    JSON,
    TooManyRequests,
    failure,
    http_exception,
    json_response,
)
from tensorforge.registry.service.limits import Limits
from tensorforge.registry.service.mlflow import mlflow_api
from tensorforge.registry.service.openapi import describe
from tensorforge.registry.service.operations import UrlTooLongError, require_scope
from tensorforge.registry.service.rest import admin_api, models_api, versions_api
from tensorforge.registry.service.shared_wire import HealthAnswer
from tensorforge.registry.tokens import Scope
from tensorforge.registry.webhooks import WebhookCourier
from tensorforge.security import TokenRecord
from tensorforge.storage.prepared import Prepared

OPERATIONS = (*models_api.OPERATIONS, *versions_api.OPERATIONS, *admin_api.OPERATIONS)
PUBLIC = frozenset({"/healthz", "/openapi.json"})
"""The only paths that answer without a token."""


def build(
    registry: ModelRegistry,
    *,
    limits: Limits | None = None,
    allow_private_webhooks: bool = False,
    deliver_webhooks: bool = True,
    more_routes: Iterable[BaseRoute] = (),
) -> ASGIApp:
    """The application over a registry, which stays the caller's to close.

    `more_routes` are served beside the registry's, behind the same tokens and limits.
    """
    service = Service(registry, limits=limits, allow_private_webhooks=allow_private_webhooks)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        courier = None
        if deliver_webhooks:
            courier = WebhookCourier(registry.database, allow_private=allow_private_webhooks)
            courier.start()
        try:
            yield
        finally:
            if courier is not None:
                await service.run(courier.close)
            service.close()

    table = endpoints(service, OPERATIONS) | mlflow_api.endpoints(service)
    table |= {
        ("GET", "/healthz"): _healthz(service),
        ("GET", "/openapi.json"): _description(),
        ("GET", "/metrics"): _metrics(service),
    }
    app = Starlette(
        routes=[*_routes(table), *more_routes],
        lifespan=lifespan,
        exception_handlers={HTTPException: http_exception},
    )
    app.router.redirect_slashes = False
    return Guard(app, service, table)


def _routes(table: Endpoints) -> list[Route]:
    by_path: dict[str, dict[str, Endpoint]] = {}
    for (method, path), endpoint in table.items():
        by_path.setdefault(path, {})[method] = endpoint
    return [
        Route(path, _dispatch(methods), methods=list(methods)) for path, methods in by_path.items()
    ]


def _dispatch(methods: dict[str, Endpoint]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        # The framework answers HEAD where there is a GET.
        return await methods[request.method if request.method != "HEAD" else "GET"](request)

    return endpoint


class Guard:
    """Stands before everything: no path is open unless it is listed as public.

    What fails is answered here, in the format of the part of the API that was asked. A path without parameters
    is found in the table at once; only others go through the framework's router.
    """

    def __init__(self, app: ASGIApp, service: Service, table: Endpoints) -> None:
        self._app = app
        self._service = service
        self._table = table

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
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
            endpoint = self._table.get((scope["method"], scope["path"]))
            if endpoint is None:
                await self._app(scope, receive, send)
            else:
                await (await endpoint(request))(scope, receive, send)
        except Exception as error:  # noqa: BLE001  the last line: every failure must have an answer
            await failure(request, error)(scope, receive, send)

    def _check_size(self, request: Request) -> None:
        limits = self._service.limits
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
        tokens = self._service.tokens
        known = tokens.authenticate_known(token.strip())
        if known is not None:
            return known
        return await self._service.run(tokens.authenticate, token.strip())

    def _limit(self, principal: TokenRecord) -> None:
        wait = self._service.limiter.wait_for(principal.token_id, self._service.monotonic())
        if wait > 0:
            raise TooManyRequests(wait)


_ANY_ROW = Prepared(sa.select(AUDIT_HEAD.c.sequence))


def _healthz(service: Service) -> Endpoint:
    def probe() -> None:
        service.registry.database.fetch(_ANY_ROW, {})

    async def healthz(_: Request) -> Response:
        await service.run(probe, quick=True)
        return json_response(200, HealthAnswer(status="ok"))

    return healthz


def _description() -> Endpoint:
    described = msgspec.json.encode(describe(OPERATIONS))

    async def description(_: Request) -> Response:
        return Response(described, media_type=JSON)

    return description


def _metrics(service: Service) -> Endpoint:
    outbox = Outbox(service.registry.database)

    async def metrics(request: Request) -> Response:
        require_scope(Scope.READ, request.scope["tensorforge.principal"])
        waiting = await service.run(outbox.waiting)
        return Response(service.metrics.expose(waiting=waiting), media_type=CONTENT_TYPE_LATEST)

    return metrics
