"""`tensorforge checkpoint`: what there is, what is kept, what to restore."""

from __future__ import annotations

import typer

from tensorforge.cli import _catalog_commands, _checkpoint_commands

app = typer.Typer(
    help="What checkpoints there are, what is kept, what to restore.", no_args_is_help=True
)
_checkpoint_commands.register(app)
_catalog_commands.register(app)
