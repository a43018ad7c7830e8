"""What the registry's commands share: options, tables, JSON and progress bars."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from tensorforge import environment
from tensorforge.errors import NotFoundError
from tensorforge.registry.database.audit import AuditEntry
from tensorforge.registry.domain.versions import ModelVersion
from tensorforge.registry.model_registry import ModelRegistry

Database = Annotated[
    str,
    typer.Option(
        envvar=environment.REGISTRY.name,
        help="The registry: a path (SQLite) or a postgresql:// URL.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
DEFAULT = str(environment.REGISTRY.default)


def plain(value: Any) -> Any:
    """A value in types that JSON has: versions as text, NaN as null."""
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


def open_existing(database: str) -> ModelRegistry:
    """Open a registry that must exist, so that a command that only reads does not create an empty one."""
    if "://" not in database and not Path(database).expanduser().exists():
        raise NotFoundError(
            f"there is no registry at {database}; `tensorforge registry register` creates one; "
            f"--database or {environment.REGISTRY.name} names another one"
        )
    return ModelRegistry(database)


def entry_lines(entry: AuditEntry) -> Iterator[str]:
    """A row of the audit for people: one line for what happened, then lines for the reason and the evidence."""
    what = entry.action.replace("_", " ")
    if entry.from_state and entry.to_state and entry.from_state != entry.to_state:
        what += f": {entry.from_state} → {entry.to_state}"
    forced = ", FORCED" if entry.forced else ""
    version = f"  {entry.version}" if entry.version else ""
    yield f"{entry.sequence:>5}  {when(entry.at)}  {entry.actor}{version}  {what}{forced}"
    if entry.reason:
        yield f"       reason: {entry.reason}"
    for line in _evidence_lines(entry.evidence):
        yield f"       {line}"


def _evidence_lines(evidence: Mapping[str, Any]) -> Iterator[str]:
    rest = dict(evidence)
    for tag, (old, new) in rest.pop("tags", {}).items():
        yield f"tag {tag}: {_shown(old)} → {_shown(new)}"
    if rest.keys() == {"old", "new"}:
        yield f"{_shown(rest.pop('old') or None)} → {_shown(rest.pop('new') or None)}"
    reasons = rest.pop("reasons", [])
    facts = [f"{name.replace('_', ' ')} {_shown(value)}" for name, value in rest.items()]
    if facts:
        yield ", ".join(facts)
    yield from reasons


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{k.replace('_', ' ')} {_shown(v)}" for k, v in value.items()) + ")"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value in (None, "") else str(value)


def when(moment: datetime) -> str:
    """A time for people."""
    return f"{moment:%Y-%m-%d %H:%M:%S}"


@contextlib.contextmanager
def progress_bar(text: str, *, quiet: bool) -> Iterator[Any]:
    """A function that updates a progress bar on standard error; `None` if `quiet` or not in a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    with Progress(
        TextColumn(text), BarColumn(), TaskProgressColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task(text)
        yield lambda done, total: bar.update(task, completed=done, total=total)
