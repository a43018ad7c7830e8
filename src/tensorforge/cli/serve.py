"""`tensorforge serve`: the registry over HTTP."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from tensorforge.cli._registry_output import DEFAULT, AsJson, Database
from tensorforge.errors import InvalidInputError
from tensorforge.registry.domain.mlflow_stages import StageMoves
from tensorforge.registry.model_registry import ModelRegistry
from tensorforge.registry.service.http_server import Loader, ServerSettings, load_application
from tensorforge.registry.service.http_server import serve as run_server
from tensorforge.registry.service.limits import Limits
from tensorforge.registry.service.service_options import PROTECTED_ALIASES
from tensorforge.registry.tokens import DatabaseTokens

app = typer.Typer(help="Serve the registry over HTTP: REST, MLflow's API, metrics, pages.")


@app.callback(invoke_without_command=True)
def serve(
    database: Database = DEFAULT,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.", min=1, max=65535)] = 8600,
    workers: Annotated[int, typer.Option(help="How many worker processes answer.", min=1)] = 1,
    rate: Annotated[
        float, typer.Option(help="Requests per second and token, on average.")
    ] = 2000.0,
    max_body: Annotated[
        int, typer.Option(help="The largest body of a request, in bytes.", min=1)
    ] = 2_000_000,
    allow_private_webhooks: Annotated[
        bool, typer.Option(help="Let webhooks reach loopback, link-local and private addresses.")
    ] = False,
    mlflow_stages: Annotated[
        StageMoves,
        typer.Option(
            help="Which moves between stages MLflow clients may make: strict is the lifecycle alone, lenient "
            "also archives from anywhere, goes back from Production, and leaves Archived."
        ),
    ] = StageMoves.LENIENT,
    protected_alias: Annotated[
        list[str] | None,
        typer.Option(
            help="An alias that needs registry:promote and points only at versions in canary or production; "
            "may be repeated. By default: champion and production."
        ),
    ] = None,
    artifacts: Annotated[
        str | None,
        typer.Option(help="Where uploaded files are stored: a folder or the URL of a blob store."),
    ] = None,
    max_artifact: Annotated[
        int, typer.Option(help="The largest uploaded file, in bytes.", min=1)
    ] = 10 * 2**30,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            help="The MLflow tracking server that resolves models:/m-... and runs:/... sources."
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="The certificate chain, PEM; with --tls-key it enables TLS.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="The certificate's private key, PEM.")
    ] = None,
    anchor: Annotated[
        list[str] | None,
        typer.Option(
            help="Where to note the audit's head on a schedule: a file, the URL of a blob store, or an http "
            "or https URL; may be repeated."
        ),
    ] = None,
    anchor_every: Annotated[
        float, typer.Option(help="The seconds between two notes of the audit's head.", min=1.0)
    ] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Serve until interrupted. Every request needs a token: `tensorforge registry token create`."""
    limits = Limits(rate=rate, burst=max(1, int(rate * 2)), body_bytes=max_body)
    settings = ServerSettings(
        database=database,
        host=host,
        port=port,
        workers=workers,
        limits=limits,
        allow_private_webhooks=allow_private_webhooks,
        stage_moves=mlflow_stages,
        protected_aliases=PROTECTED_ALIASES
        if protected_alias is None
        else frozenset(alias.lower() for alias in protected_alias if alias),
        tls_cert=tls_cert,
        tls_key=tls_key,
        artifacts=artifacts,
        max_artifact_bytes=max_artifact,
        tracking_uri=tracking_uri,
        tracking_token=os.environ.get("MLFLOW_TRACKING_TOKEN", ""),
        anchor_targets=tuple(anchor or ()),
        anchor_seconds=anchor_every,
    )
    with ModelRegistry(database) as registry:
        if registry.database.is_in_memory:
            raise InvalidInputError("a registry in memory cannot be served: give a file or a URL")
        tokens = len(DatabaseTokens(registry.database).records())
    _announce(settings, tokens, as_json=as_json)
    run_server(settings, _loader())


def _loader() -> Loader:
    """What each worker process serves: the API, and the pages if their packages are installed."""
    if importlib.util.find_spec("jinja2") is None or importlib.util.find_spec("starlette") is None:
        return load_application
    from tensorforge.dashboard.dashboard_server import load_with_registry

    return functools.partial(load_with_registry, secrets.token_hex())


def _announce(settings: ServerSettings, tokens: int, *, as_json: bool) -> None:
    scheme = "http" if settings.tls_cert is None else "https"
    url = f"{scheme}://{settings.host}:{settings.port}"
    if as_json:
        typer.echo(json.dumps({"url": url, "pid": os.getpid(), "tokens": tokens}))
        return
    typer.echo(
        f"Registry on {url} (REST: /api/v1, MLflow: {url}, description: /openapi.json, pages: /ui)"
    )
    if not tokens:
        typer.echo(
            "There is no token yet, so nobody can use the service: "
            "tensorforge registry token create ME --scope registry:read"
        )
