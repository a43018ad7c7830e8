"""The ASGI application of the pages: sessions, security headers, routes, and errors as pages."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from importlib.resources import files
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tensorforge.dashboard.checkpoint_pages import CheckpointPages
from tensorforge.dashboard.memory_pages import MemoryPages
from tensorforge.dashboard.model_pages import ModelPages
from tensorforge.dashboard.page_context import VISITOR, PageContext, go, read_form
from tensorforge.dashboard.run_pages import RunPages
from tensorforge.dashboard.sessions import COOKIE, OBSERVE, SESSION_SECONDS
from tensorforge.errors import (
    AuthenticationError,
    ConflictError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    TensorForgeError,
    UnavailableError,
)

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
STATIC = {
    "dashboard.js": "text/javascript",
    "dashboard.css": "text/css",
    "icon.svg": "image/svg+xml",
}
OPEN = ("/sign-in", *(f"/static/{name}" for name in STATIC))
"""The paths that need no session."""
_STATUS = (
    (AuthenticationError, 401),
    (PermissionDeniedError, 403),
    (NotFoundError, 404),
    (ConflictError, 409),
    (InvalidInputError, 400),
    (UnavailableError, 503),
)


def build(context: PageContext) -> ASGIApp:
    """The application with all pages. At shutdown it closes the sources of runs, not the registry."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        # Read once before anybody waits for it; later only what changed is read again.
        await context.run(lambda: [source.summary() for source in context.runs.all()])
        try:
            yield
        finally:
            await context.run(context.runs.close)

    pages = _FirstPages(context)
    routes = [
        Route("/", pages.start),
        Route("/sign-in", pages.sign_in, methods=["GET", "POST"]),
        Route("/sign-out", pages.sign_out, methods=["POST"]),
        Route("/static/{name}", _static),
        *RunPages(context).routes(),
        *CheckpointPages(context).routes(),
        *ModelPages(context).routes(),
        *MemoryPages(context).routes(),
    ]

    async def failed(request: Request, error: Exception) -> Response:
        return _error_page(context, request, error)

    handlers = {TensorForgeError: failed, HTTPException: failed}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    return SessionMiddleware(app, context)


class SessionMiddleware:
    """Finds the visitor of a request, refuses forms of other sites, and adds the security headers."""

    def __init__(self, app: ASGIApp, context: PageContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if it has a session or needs none; otherwise send the browser to sign in."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY_HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        response = await self._refusal(request)
        await (self._app if response is None else response)(scope, receive, send_with_headers)

    async def _refusal(self, request: Request) -> Response | None:
        base = request.scope.get("root_path", "")
        path = request.scope["path"].removeprefix(base)
        if request.method not in ("GET", "HEAD") and not _is_same_site(request.headers):
            return Response("a form of another site", 403)
        cookie = request.cookies.get(COOKIE, "")
        visitor = await self._context.run(self._context.sessions.visitor, cookie)
        if visitor is not None:
            request.scope[VISITOR] = visitor
            return None
        if path in OPEN:
            return None
        if request.headers.get("accept", "").startswith("text/event-stream"):
            return Response("sign in", 401)
        return RedirectResponse(f"{base}/sign-in", 303)


class _FirstPages:
    def __init__(self, context: PageContext) -> None:
        self._context = context

    async def start(self, request: Request) -> Response:
        sees_runs = request.scope[VISITOR].may(OBSERVE)
        return go(request, "/runs" if sees_runs else "/models")

    async def sign_in(self, request: Request) -> Response:
        if request.method != "POST":
            return self._context.page(request, "sign_in.html", problem="")
        request.scope.pop(VISITOR, None)
        fields = await read_form(request)
        sign_in = self._context.sessions.sign_in
        try:
            cookie = await self._context.run(sign_in, fields.get("token", ""))
        except AuthenticationError as error:
            return self._context.page(request, "sign_in.html", 401, problem=str(error))
        response = go(request, "/")
        response.set_cookie(
            COOKIE,
            cookie,
            max_age=SESSION_SECONDS,
            path=request.scope.get("root_path", "") or "/",
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    async def sign_out(self, request: Request) -> Response:
        await read_form(request)
        response = go(request, "/sign-in")
        response.delete_cookie(COOKIE, path=request.scope.get("root_path", "") or "/")
        return response


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in STATIC:
        raise NotFoundError("there is no such file")
    data = (files("tensorforge.dashboard") / "static" / name).read_bytes()
    return Response(data, media_type=STATIC[name], headers={"cache-control": "no-cache"})


def _is_same_site(headers: Headers) -> bool:
    """Whether the browser says that the form is of this server; a client that says nothing is no browser."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


def _error_page(context: PageContext, request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        status, text = error.status_code, error.detail
    else:
        status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
        text = str(error)
    return context.page(request, "error.html", status, code=status, text=text)
