"""`PageContext`: what the handlers of all pages share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tensorforge.dashboard.live_updates import Broadcast
from tensorforge.dashboard.page_renderer import PageRenderer
from tensorforge.dashboard.run_sources import RunSources
from tensorforge.dashboard.sessions import OBSERVE, Sessions, Visitor, is_csrf_valid
from tensorforge.errors import InvalidInputError, PermissionDeniedError
from tensorforge.registry.model_registry import ModelRegistry

FORM_BYTES = 64 << 10
VISITOR = "tensorforge.visitor"
REGISTRY_READ = "registry:read"
Result = TypeVar("Result")
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContext:
    """The sources of facts, the sessions and the templates of one server process.

    `catalog` and `store` are used for runs whose folder has no catalog of its own.
    """

    sessions: Sessions
    runs: RunSources
    registry: ModelRegistry | None = None
    catalog: str | None = None
    store: str | None = None
    traces: tuple[Path, ...] = ()
    renderer: PageRenderer = field(default_factory=PageRenderer)
    broadcasts: dict[str, Broadcast] = field(default_factory=dict)

    def broadcast(self, key: str, produce: Callable[[], Mapping[str, str]]) -> Broadcast:
        """The broadcast of a page, made when the first person watches it."""
        return self.broadcasts.setdefault(key, Broadcast(produce))

    def page(
        self, request: Request, template: str, /, status: int = 200, **values: Any
    ) -> Response:
        """A whole page, with the navigation that the visitor may use."""
        visitor: Visitor | None = request.scope.get(VISITOR)
        base = request.scope.get("root_path", "")
        areas = []
        if visitor is not None and visitor.may(OBSERVE):
            areas += [("runs", "Runs"), ("memory", "Memory")]
        if visitor is not None and self.registry is not None and visitor.may(REGISTRY_READ):
            areas.insert(1, ("models", "Models"))
        path = request.url.path.removeprefix(base).strip("/").partition("/")[0]
        html = self.renderer.render(
            template,
            base=base,
            visitor=visitor,
            areas=areas,
            area=path,
            done=request.query_params.get("done", "")[:300],
            **values,
        )
        return HTMLResponse(html, status)

    async def run(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run blocking work in a thread."""
        return await run_in_threadpool(work, *arguments)


def visitor_of(request: Request, scope: str) -> Visitor:
    """The visitor of a request, who must have the scope."""
    visitor: Visitor = request.scope[VISITOR]
    visitor.require(scope)
    return visitor


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form that came from a page of this session; otherwise `PermissionDeniedError`."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > FORM_BYTES:
            raise InvalidInputError(f"the form has more than {FORM_BYTES} bytes")
    fields = dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))
    visitor: Visitor | None = request.scope.get(VISITOR)
    if visitor is not None and not is_csrf_valid(visitor, fields.get("csrf", "")):
        raise PermissionDeniedError("the form is not of this session; open the page again")
    return fields


def require_confirmation(fields: Mapping[str, str]) -> None:
    """Refuse a form whose confirmation was not ticked."""
    if fields.get("confirmed") != "yes":
        raise InvalidInputError("tick the confirmation first; nothing was changed")


def whole(fields: Mapping[str, str], name: str) -> int:
    """The whole number in a field; `InvalidInputError` if it is none."""
    text = fields.get(name, "").strip()
    if not text.isdecimal() or len(text) > 12:
        raise InvalidInputError(f"{name} = {text[:40]!r}: must be a whole number")
    return int(text)


def go(request: Request, path: str, done: str = "") -> Response:
    """Send the browser to a page after a change; `done` says there what was changed."""
    from urllib.parse import quote

    base = request.scope.get("root_path", "")
    return RedirectResponse(f"{base}{path}" + (f"?done={quote(done)}" if done else ""), 303)
