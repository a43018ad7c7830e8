"""What the registry's commands share: options, tables, JSON, progress."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from datetime import datetime
from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from tensorforge.registry.versions import ModelVersion

Database = Annotated[
    str,
    typer.Option(
        envvar="TENSORFORGE_REGISTRY",
        help="Where the registry lies: a path (SQLite) or a postgresql:// URL.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
DEFAULT = "registry.db"


def plain(value: Any) -> Any:
    """A value as JSON can hold it: versions as text, NaN as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if isinstance(value, ModelVersion):
            return str(value)
        names = [field.name for field in dataclasses.fields(value)]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and value != value:
        return None
    return value


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(plain(value), indent=2))


def table_of(*columns: str) -> Table:
    """An empty table with these columns."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def when(moment: datetime) -> str:
    """A time as people read it."""
    return f"{moment:%Y-%m-%d %H:%M:%S}"


@contextlib.contextmanager
def progress_bar(text: str, *, quiet: bool) -> Iterator[Any]:
    """A progress bar on standard error; nothing where nobody looks."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    with Progress(
        TextColumn(text), BarColumn(), TaskProgressColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task(text)
        yield lambda done, total: bar.update(task, completed=done, total=total)
