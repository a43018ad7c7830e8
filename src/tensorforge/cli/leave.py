"""`tensorforge leave`: make a worker leave the run."""

from __future__ import annotations

from typing import Annotated

import typer

from tensorforge.cli._cluster import AsJson, as_json, member_count, operator, with_client
from tensorforge.elastic.client import CoordinatorClient
from tensorforge.wording import counted

app = typer.Typer(help="Make a worker leave after its current step.")


@app.command()
@with_client
def leave(
    client: CoordinatorClient,
    worker: Annotated[str, typer.Argument(help="The worker's id.")],
    json_output: AsJson = False,
) -> None:
    """Make a worker finish its step and leave; the others continue without it."""
    view = client.remove(worker, by=operator())
    members = counted(member_count(view), "worker")
    text = f"{worker} leaves; generation {view.generation} has {members}"
    typer.echo(as_json(view) if json_output else text)
