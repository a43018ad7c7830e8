"""`tensorforge dashboard`: pages that show runs, checkpoints, models and traces of memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from tensorforge import environment
from tensorforge.errors import InvalidInputError

app = typer.Typer(help="Serve pages that show runs, checkpoints, models and traces of memory.")


@app.command()
def dashboard(
    places: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folders of runs, or HOST:PORT of coordinators; default: runs.", metavar="PLACE…"
        ),
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(
            envvar=environment.REGISTRY.name, help="Also show the models of this registry."
        ),
    ] = None,
    catalog: Annotated[
        str | None,
        typer.Option(
            envvar=environment.CATALOG.name,
            help="The catalog of runs that have none in their folder.",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(envvar=environment.STORE.name, help="The store of that catalog."),
    ] = None,
    trace: Annotated[
        list[Path] | None, typer.Option(help="A trace of allocations to show; may be repeated.")
    ] = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Also issue a token that may change things.")
    ] = False,
    token: Annotated[
        str | None,
        typer.Option(envvar=environment.TOKEN.name, help="The token for the coordinators."),
    ] = None,
    token_folder: Annotated[
        Path | None,
        typer.Option(help="Where the dashboard's tokens are kept; default: the first folder."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="The port; 0 picks a free one.", min=0, max=65535)
    ] = 8700,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as JSON.")] = False,
) -> None:
    """Serve the pages until interrupted. Open the printed link: it signs the browser in."""
    from tensorforge.dashboard.dashboard_server import (
        DashboardSettings,
        free_port,
        make_tokens,
        require_packages,
        serve,
        split_places,
    )

    require_packages()
    folders, addresses = split_places(places or ())
    kept = token_folder or next(iter(folders), None)
    if kept is None:
        raise InvalidInputError("name the folder for the dashboard's tokens: --token-folder")
    read, operate = make_tokens(kept, may_change=allow_changes)
    settings = DashboardSettings(
        folders=folders,
        coordinators=addresses,
        coordinator_token=token,
        registry=registry,
        catalog=catalog,
        store=store,
        traces=tuple(path.absolute() for path in trace or ()),
        host=host,
        port=port or free_port(),
        read_token=read,
        operate_token=operate,
    )
    _announce(settings.url, read, operate, as_json=as_json)
    serve(settings)


def _announce(url: str, read: str, operate: str | None, *, as_json: bool) -> None:
    if as_json:
        facts = {"url": url, "pid": os.getpid(), "read_token": read, "operate_token": operate}
        typer.echo(json.dumps(facts))
        return
    typer.echo(f"To look:   {url}/sign-in#{read}")
    if operate is not None:
        typer.echo(f"To change: {url}/sign-in#{operate}")
    else:
        typer.echo(
            "The pages are read-only; --allow-changes issues a token that may change things."
        )
