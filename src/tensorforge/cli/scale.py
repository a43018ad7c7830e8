"""`tensorforge scale`: have another number of workers."""

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

app = typer.Typer(help="Have another number of workers.")


@app.command()
def scale(
    workers: Annotated[int, typer.Argument(help="How many.")],
    coordinator: Address,
    token: Token = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    json_output: AsJson = False,
) -> None:
    """Set the wanted number: surplus workers retire after their step, launchers start what is missing."""
    with connect(coordinator, token, token_file, ca, cert, key) as client:
        view = client.scale(workers, by=operator())
    if json_output:
        typer.echo(as_json(view))
        return
    members = sum(1 for worker in view.workers if worker.rank >= 0)
    typer.echo(
        f"{workers} workers are wanted; {members} are members of generation {view.generation}"
    )
