"""`tensorforge coordinator journal check | backup`: look at a journal without its coordinator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tensorforge.cli._cluster import AsJson
from tensorforge.errors import AlreadyExistsError, NotFoundError

journal_commands = typer.Typer(help="Check a journal, or copy it.", no_args_is_help=True)

Where = Annotated[str, typer.Argument(help="Path or URL of the metadata database.")]
Run = Annotated[str, typer.Option("--run", help="The run's name in the journal.")]


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _existing(journal: str) -> str:
    if "://" not in journal and not Path(journal).exists():
        raise NotFoundError(f"there is no database {journal}")
    return journal


@journal_commands.command()
def check(journal: Where, run: Run = "default", json_output: AsJson = False) -> None:
    """Verify the hash chain of a run's journal; exit 1 and name the first entry that is wrong.

    The coordinator of the run may be running.
    """
    from tensorforge.elastic.coordinator.journal import Journal
    from tensorforge.storage.database import Database

    with Database(_existing(journal)) as database:
        entries = Journal(database, run).check()
    text = f"the journal of run {run!r} is intact: {_entries(entries)}"
    typer.echo(json.dumps({"run": run, "entries": entries}) if json_output else text)


@journal_commands.command()
def backup(
    journal: Where,
    target: Annotated[Path, typer.Argument(help="The file to make.")],
    run: Run = "default",
    json_output: AsJson = False,
) -> None:
    """Check the journal, then copy its SQLite database, also while its coordinator writes to it.

    To restore, stop the coordinator, remove the database with its other files, and rename the copy.
    """
    from tensorforge.elastic.coordinator.journal import Journal
    from tensorforge.storage.database import Database

    if target.exists():
        raise AlreadyExistsError(f"{target} exists; name a file that does not")
    with Database(_existing(journal)) as database:
        Journal(database, run).check()
        database.backup(target)
    with Database(target) as copy:
        entries = Journal(copy, run).check()
    text = f"{target} has {_entries(entries)} of run {run!r}"
    typer.echo(json.dumps({"target": str(target), "entries": entries}) if json_output else text)
