"""The HTTP server process of a registry."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tensorforge.errors import InvalidInputError
from tensorforge.registry.model_registry import ModelRegistry
from tensorforge.registry.service.limits import Limits
from tensorforge.storage.sqlite_memory import stop_counting_memory

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable by which Prometheus' client finds the workers' shared folder when it is imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How to serve a registry. The default `host` accepts connections from this machine only."""

    database: str
    host: str = "127.0.0.1"
    port: int = 8600
    workers: int = 1
    limits: Limits = field(default_factory=Limits)
    allow_private_webhooks: bool = False


Loader = Callable[..., Any]


def load_application(settings: ServerSettings, *_: object) -> Any:
    """The application of one worker process, with its own database connections."""
    from tensorforge.registry.service.application import build

    return build(
        ModelRegistry(settings.database),
        limits=settings.limits,
        allow_private_webhooks=settings.allow_private_webhooks,
    )


def serve(settings: ServerSettings, load: Loader = load_application) -> None:
    """Serve until the process gets SIGINT or SIGTERM.

    Each worker process calls `load` for the application that it serves.
    """
    try:
        from granian import Granian
        from granian.constants import Interfaces
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"{error.name} is not installed; install tensorforge[serve]"
        ) from error
    stop_counting_memory()
    server = Granian(
        "tensorforge.registry.service.http_server:load_application",
        address=settings.host,
        port=settings.port,
        interface=Interfaces.ASGI,
        workers=settings.workers,
        websockets=False,
        log_access=False,
        log_enabled=False,
    )
    loader = functools.partial(load, settings)
    with _shared_metrics() if settings.workers > 1 else contextlib.nullcontext():
        server.serve(target_loader=loader, wrap_loader=False)


@contextlib.contextmanager
def _shared_metrics() -> Iterator[None]:
    """A folder in which workers that are started meanwhile share their metrics: see `service_metrics`."""
    with tempfile.TemporaryDirectory(prefix="tensorforge-metrics-") as folder:
        os.environ[SHARED_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[SHARED_FOLDER]
