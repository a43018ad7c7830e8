"""The entry point: finds commands by module name and prints errors as messages."""

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
    """The module of each command, by the command's name."""
    return {
        module.name.replace("_", "-"): f"{cli.__name__}.{module.name}"
        for module in pkgutil.iter_modules(cli.__path__)
        if not module.name.startswith("_") and module.name != "main"
    }


class _CommandsByModule(TyperGroup):
    """Imports a command's module only when that command runs or all commands are listed."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  the framework's signature
        return sorted(command_modules())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        module = command_modules().get(cmd_name)
        if module is None:
            return None
        app = importlib.import_module(module).app
        app._add_completion = False  # noqa: SLF001  an option of the program, not of each command
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
    """Handle the options before the command."""


def _open_closed_streams() -> None:
    """Open closed standard streams (`>&-`) on /dev/null, so that no other file gets their descriptor."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  stays open


def _escape_unencodable_output() -> None:
    """Print characters that the terminal's encoding lacks as escapes instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. A `TensorForgeError` is printed as a message with exit code 1."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    _escape_unencodable_output()
    try:
        app(words)
    except TensorForgeError as error:
        if "--json" in words:
            typer.echo(json.dumps({"error": type(error).__name__, "message": str(error)}))
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        raise SystemExit(1) from None
    except BrokenPipeError:
        # The reader of the output has closed its pipe (`| head`); that is no error.
        sys.stderr.close()
        raise SystemExit(141) from None
