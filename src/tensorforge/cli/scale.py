"""`tensorforge scale`: set the target number of workers."""

from __future__ import annotations

from typing import Annotated

import typer

from tensorforge.cli._cluster import AsJson, as_json, member_count, operator, with_client
from tensorforge.elastic.client import CoordinatorClient
from tensorforge.wording import counted

app = typer.Typer(help="Set the target number of workers.")


@app.command()
@with_client
def scale(
    client: CoordinatorClient,
    workers: Annotated[int, typer.Argument(help="The target.")],
    json_output: AsJson = False,
) -> None:
    """Set the target: surplus workers leave after their step, the launcher starts missing ones."""
    view = client.scale(workers, by=operator())
    members, generation = member_count(view), view.generation
    text = f"{counted(workers, 'worker')} wanted; generation {generation} has {members}"
    typer.echo(as_json(view) if json_output else text)
