"""`tensorforge leave`: let a worker go."""

from __future__ import annotations

from typing import Annotated

import typer

from tensorforge.cli._cluster import (
    Address,
    AsJson,
    Ca,
    Cert,
    Key,
    Token,
    TokenFile,
    as_json,
    connect,
    operator,
)

app = typer.Typer(help="Let a worker leave after its current step.")


@app.command()
def leave(
    worker: Annotated[str, typer.Argument(help="The worker's id.")],
    coordinator: Address,
    token: Token = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    json_output: AsJson = False,
) -> None:
    """Let a worker finish its step and leave; the others go on without it."""
    with connect(coordinator, token, token_file, ca, cert, key) as client:
        view = client.remove(worker, by=operator())
    if json_output:
        typer.echo(as_json(view))
        return
    members = sum(1 for member in view.workers if member.rank >= 0)
    typer.echo(f"{worker} leaves; generation {view.generation} has {members} workers")
