"""The HTTP server process of a registry."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorforge.errors import InvalidInputError, UnavailableError
from tensorforge.registry.anchoring import AnchorSchedule
from tensorforge.registry.domain.mlflow_stages import StageMoves
from tensorforge.registry.model_registry import ModelRegistry
from tensorforge.registry.service.limits import Limits
from tensorforge.registry.service.service_options import PROTECTED_ALIASES, ServiceOptions
from tensorforge.storage.opening import open_store
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
    stage_moves: StageMoves = StageMoves.LENIENT
    protected_aliases: frozenset[str] = PROTECTED_ALIASES
    tls_cert: Path | None = None
    tls_key: Path | None = None
    artifacts: str | None = None
    max_artifact_bytes: int = 10 * 2**30
    tracking_uri: str | None = None
    tracking_token: str = ""
    anchor_targets: tuple[str, ...] = ()
    anchor_seconds: float = 3600.0

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidInputError("TLS needs both a certificate and its key")


Loader = Callable[..., Any]


def load_application(settings: ServerSettings, *_: object) -> Any:
    """The application of one worker process, with its own database connections."""
    from tensorforge.registry.service.application import build

    registry = ModelRegistry(settings.database)
    return build(
        registry,
        limits=settings.limits,
        options=_options(settings, registry),
        anchoring=_anchoring(settings, registry),
    )


def _options(settings: ServerSettings, registry: ModelRegistry) -> ServiceOptions:
    from tensorforge.registry.artifacts import ArtifactStore
    from tensorforge.registry.sources import SourceResolver

    artifacts = sources = None
    if settings.artifacts is not None:
        store = open_store(settings.artifacts)
        artifacts = ArtifactStore(registry.database, store, max_bytes=settings.max_artifact_bytes)
    if settings.tracking_uri is not None:
        sources = SourceResolver(settings.tracking_uri, token=settings.tracking_token)
    return ServiceOptions(
        allow_private_webhooks=settings.allow_private_webhooks,
        stage_moves=settings.stage_moves,
        protected_aliases=settings.protected_aliases,
        artifacts=artifacts,
        sources=sources,
    )


def _anchoring(settings: ServerSettings, registry: ModelRegistry) -> AnchorSchedule | None:
    if not settings.anchor_targets:
        return None
    return AnchorSchedule(
        registry.database,
        settings.anchor_targets,
        seconds=settings.anchor_seconds,
        allow_private=settings.allow_private_webhooks,
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
    with exclusive_port(settings.host, settings.port):
        _serve(Granian, Interfaces.ASGI, settings, functools.partial(load, settings))


def _serve(
    granian: Any, interface: Any, settings: ServerSettings, loader: Callable[..., Any]
) -> None:
    server = granian(
        "tensorforge.registry.service.http_server:load_application",
        address=settings.host,
        port=settings.port,
        interface=interface,
        workers=settings.workers,
        websockets=False,
        log_access=False,
        log_enabled=False,
        ssl_cert=settings.tls_cert,
        ssl_key=settings.tls_key,
    )
    with _shared_metrics() if settings.workers > 1 else contextlib.nullcontext():
        server.serve(target_loader=loader, wrap_loader=False)


@contextlib.contextmanager
def exclusive_port(host: str, port: int) -> Iterator[None]:
    """Make sure that no other server listens on the port, and that none starts to meanwhile.

    The server shares its port between its workers, so a second server could share it as well. A local socket
    that is named after the port, and that the system closes with the process, excludes that.
    `UnavailableError` if the port is taken.
    """
    with socket.socket(socket.AF_UNIX) as mark:
        try:
            mark.bind(f"\0tensorforge-serve-{port}")
            _try_to_bind(host, port)
        except OSError as error:
            raise UnavailableError(
                f"port {port} of {host} cannot be used: {error.strerror or error}. "
                "Another server listens there"
            ) from error
        yield


def _try_to_bind(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


@contextlib.contextmanager
def _shared_metrics() -> Iterator[None]:
    """A folder in which workers that are started meanwhile share their metrics: see `service_metrics`."""
    with tempfile.TemporaryDirectory(prefix="tensorforge-metrics-") as folder:
        os.environ[SHARED_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[SHARED_FOLDER]
