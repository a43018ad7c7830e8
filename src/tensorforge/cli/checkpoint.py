"""`tensorforge checkpoint`: list, verify, compare, convert, delete and restore checkpoints."""

from __future__ import annotations

import typer

from tensorforge.cli import _catalog_commands, _checkpoint_commands

app = typer.Typer(
    help="List, verify, compare, convert, delete and restore checkpoints.", no_args_is_help=True
)
_checkpoint_commands.register(app)
_catalog_commands.register(app)
