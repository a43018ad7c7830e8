"""The server process of the pages: alone, or beside the API of a registry."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from tensorforge.dashboard.sessions import CONTROL, OBSERVE, Sessions, Tokens
from tensorforge.elastic.protocol.access import is_loopback
from tensorforge.elastic.protocol.token_files import load_or_issue
from tensorforge.errors import InvalidInputError
from tensorforge.launch.run_directory import make_folder
from tensorforge.registry.model_registry import ModelRegistry
from tensorforge.registry.service.http_server import ServerSettings
from tensorforge.registry.service.http_server import load_application as load_registry
from tensorforge.registry.tokens import DatabaseTokens
from tensorforge.registry.tokens import Scope as RegistryScope
from tensorforge.security import TokenStore

PREFIX = "/ui"
"""Where `tensorforge serve` has the pages."""
_STOP_SECONDS = 5.0
READ_SCOPES = (OBSERVE, RegistryScope.READ.value)
OPERATE_SCOPES = (
    *READ_SCOPES,
    CONTROL,
    RegistryScope.WRITE.value,
    RegistryScope.TRANSITION.value,
    RegistryScope.FORCE.value,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardSettings:
    """What the pages show, and where they are served.

    `read_token` shows everything; `operate_token`, if there is one, may also change things. Tokens of the
    registry's database are valid as well. `coordinator_token` is sent to the coordinators.
    """

    folders: tuple[Path, ...] = ()
    coordinators: tuple[str, ...] = ()
    coordinator_token: str | None = None
    registry: str | None = None
    catalog: str | None = None
    store: str | None = None
    traces: tuple[Path, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8700
    read_token: str | None = None
    operate_token: str | None = None

    @property
    def url(self) -> str:
        """The address for a browser on this machine."""
        return f"http://{self.host}:{self.port}"


def require_packages() -> None:
    """Raise an error that names the extra if a package of the pages is missing."""
    for name in ("jinja2", "starlette", "granian"):
        if importlib.util.find_spec(name) is None:
            raise InvalidInputError(
                f"the dashboard needs {name}, which is not installed; install tensorforge[serve]"
            )


def make_tokens(folder: Path, *, may_change: bool) -> tuple[str, str | None]:
    """The token that reads and, if wanted, the one that changes; both are kept in files of their owner."""
    store = TokenStore()
    read = load_or_issue(store, folder / ".dashboard-read-token", "reader", READ_SCOPES)
    if not may_change:
        return read, None
    operate = load_or_issue(store, folder / ".dashboard-token", "operator", OPERATE_SCOPES)
    return read, operate


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def load_application(settings: DashboardSettings, *_: object) -> ASGIApp:
    """The pages alone."""
    from tensorforge.dashboard.dashboard_app import build
    from tensorforge.dashboard.page_context import PageContext
    from tensorforge.dashboard.run_sources import RunSources

    registry = None if settings.registry is None else ModelRegistry(settings.registry)
    store = TokenStore()
    if settings.read_token is not None:
        store.adopt(settings.read_token, "reader", READ_SCOPES)
    if settings.operate_token is not None:
        store.adopt(settings.operate_token, "operator", OPERATE_SCOPES)
    stores: list[Tokens] = [store]
    if registry is not None:
        stores.append(DatabaseTokens(registry.database))
    key = hashlib.sha256(b"session " + (settings.read_token or secrets.token_hex()).encode())
    return build(
        PageContext(
            sessions=Sessions(key.digest(), stores),
            runs=RunSources(settings.folders, settings.coordinators, settings.coordinator_token),
            registry=registry,
            catalog=settings.catalog,
            store=settings.store,
            traces=settings.traces,
        )
    )


def load_with_registry(key: str, settings: ServerSettings, *_: object) -> ASGIApp:
    """The API of a registry, and the pages about its models under `/ui`.

    All processes of one server get the same `key`, so that they accept each other's sessions.
    """
    from tensorforge.dashboard.dashboard_app import build
    from tensorforge.dashboard.page_context import PageContext
    from tensorforge.dashboard.run_sources import RunSources

    registry = ModelRegistry(settings.database)
    sessions = Sessions(key.encode(), [DatabaseTokens(registry.database)])
    pages = build(PageContext(sessions=sessions, runs=RunSources(), registry=registry))
    return ByPrefix(load_registry(settings), pages)


class ByPrefix:
    """Sends requests for the pages to the pages, and every other one to the API."""

    def __init__(self, api: ASGIApp, pages: ASGIApp) -> None:
        self._api = api
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Choose by the path."""
        path = scope.get("path", "")
        if scope["type"] == "http" and (path == PREFIX or path.startswith(f"{PREFIX}/")):
            inner = {**scope, "root_path": PREFIX}
            if path == PREFIX:
                inner["path"] = f"{PREFIX}/"
            await self._pages(inner, receive, send)
        else:
            await self._api(scope, receive, send)


def serve(settings: DashboardSettings) -> None:
    """Serve the pages until the process gets SIGINT or SIGTERM."""
    require_packages()
    if not is_loopback(settings.host) and settings.read_token is None:
        raise InvalidInputError("a dashboard that other machines reach needs a token")
    from granian import Granian
    from granian.constants import Interfaces

    server = Granian(
        "tensorforge.dashboard.dashboard_server:load_application",
        address=settings.host,
        port=settings.port,
        interface=Interfaces.ASGI,
        workers=1,
        websockets=False,
        log_access=False,
        log_enabled=False,
        workers_kill_timeout=2,
    )
    load = functools.partial(load_application, settings)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve(target_loader=load, wrap_loader=False)


@contextlib.contextmanager
def beside_run(folder: Path, port: int) -> Iterator[tuple[str, str]]:
    """Serve the pages of one run in a process that ends with the block, or when this process dies.

    Yields the address and a token that may change the run: who can read the run's folder may do so anyway.
    """
    require_packages()
    make_folder(folder)
    read, operate = make_tokens(folder, may_change=True)
    settings = DashboardSettings(
        folders=(folder.absolute(),),
        port=port or free_port(),
        read_token=read,
        operate_token=operate,
    )
    # "spawn": a copy of this process would inherit its threads' locks and its signal handlers.
    server = multiprocessing.get_context("spawn").Process(
        target=_serve_until_orphaned, args=(settings, os.getpid()), name="dashboard"
    )
    server.start()
    try:
        yield settings.url, operate or read
    finally:
        server.terminate()
        server.join(_STOP_SECONDS)
        if server.is_alive():
            server.kill()
            server.join()


def _serve_until_orphaned(settings: DashboardSettings, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    serve(settings)


def split_places(places: Sequence[str]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """The folders and the addresses among the places that a person named; by default the folder `runs`."""
    folders, addresses = [], []
    for place in places or ("runs",):
        host, _, port = place.rpartition(":")
        if not Path(place).exists() and host and port.isdecimal():
            addresses.append(place.removeprefix("http://"))
        elif Path(place).is_dir():
            folders.append(Path(place).absolute())
        else:
            raise InvalidInputError(f"{place} is neither a folder nor HOST:PORT of a coordinator")
    return tuple(folders), tuple(addresses)
