"""The entry point: finds commands by module name and turns errors into messages."""

from __future__ import annotations

import importlib
import io
import json
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import tensorforge
from tensorforge import cli
from tensorforge.errors import TensorForgeError


def command_modules() -> dict[str, str]:
    """Command name → module, for every command there is."""
    return {
        module.name.replace("_", "-"): f"{cli.__name__}.{module.name}"
        for module in pkgutil.iter_modules(cli.__path__)
        if not module.name.startswith("_") and module.name != "main"
    }


class _CommandsByModule(TyperGroup):
    """Imports a command's module only when that command, or the list of all, is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  the framework's signature
        return sorted(command_modules())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        module = command_modules().get(cmd_name)
        if module is None:
            return None
        app = importlib.import_module(module).app
        app._add_completion = False  # noqa: SLF001  it is an option of the program, not of each command
        command = typer.main.get_command(app)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_CommandsByModule,
    no_args_is_help=True,
    add_completion=False,
    help="Elastic training for PyTorch, with checkpoints, a memory pool and a model registry.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tensorforge {tensorforge.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Take the options that stand before the command."""


def _open_closed_streams() -> None:
    """Whoever closed a standard stream (`>&-`) wants silence, not files that take its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  stays open


def _escape_what_cannot_be_shown() -> None:
    """A worker may print what the terminal's encoding lacks: no reason to end the run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. A `TensorForgeError` is a message and exit code 1, not a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    _escape_what_cannot_be_shown()
    try:
        app(words)
    except TensorForgeError as error:
        if "--json" in words:
            typer.echo(json.dumps({"error": type(error).__name__, "message": str(error)}))
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        raise SystemExit(1) from None
    except BrokenPipeError:
        # The reader of our output went away (`| head`): not an error of ours.
        sys.stderr.close()
        raise SystemExit(141) from None
