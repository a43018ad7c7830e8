"""`tensorforge worker`: join a run from any machine."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from tensorforge import environment
from tensorforge.cli._cluster import (
    Address,
    AsJson,
    Ca,
    Cert,
    Key,
    TokenFile,
    find_token,
    locate,
    tls_options,
)
from tensorforge.cli.run import AsModule, ScriptArguments, script_arguments
from tensorforge.elastic.client import CoordinatorClient
from tensorforge.errors import ConflictError, PermissionDeniedError
from tensorforge.launch.launch_settings import bootstrap_command, require_script

app = typer.Typer(help="Join a run from any machine.")


@app.command(context_settings={"allow_interspersed_args": False})
def worker(
    script: Annotated[str, typer.Argument(help="The script that the other workers run.")],
    arguments: ScriptArguments = None,
    coordinator: Address = None,
    name: Annotated[
        str | None, typer.Option("--id", help="The worker's name; by default host name and pid.")
    ] = None,
    module: AsModule = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="The run's folder, if this machine has it: to find the run and for logs."
        ),
    ] = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    json_output: AsJson = False,
) -> None:
    """Run SCRIPT as one more worker of the run that the coordinator leads.

    This process becomes the worker. SIGTERM or an interrupt makes it leave after its step, SIGUSR1 shows
    the script's stack. The exit code is that of the script; it is 75 if the worker left, or the run was
    stopped, before the goal was reached.
    """
    if not module:
        require_script(script)
    coordinator, run_dir = locate(coordinator, run_dir)
    token = find_token(token_file, run_dir)
    with CoordinatorClient(coordinator, token=token, tls=tls_options(ca, cert, key)) as client:
        try:
            view = client.status()
        except PermissionDeniedError:
            view = None  # a token for joining need not allow observing
    if view is not None and view.ended is not None:
        raise ConflictError(f"the run is over ({view.ended.outcome}): {view.ended.reason}")
    chosen = name or f"{socket.gethostname()}-{os.getpid()}"
    variables = environment.for_child(
        {
            environment.COORDINATOR: coordinator,
            environment.WORKER_ID: chosen,
            environment.TOKEN: token,
            environment.RUN_DIR: None if run_dir is None else run_dir.absolute(),
            environment.CA: ca,
            environment.CERT: cert,
            environment.KEY: key,
        }
    )
    joined = {"worker": chosen, "coordinator": coordinator, "pid": os.getpid()}
    typer.echo(json.dumps(joined) if json_output else f"{chosen} joins {coordinator}")
    sys.stdout.flush()
    words = script_arguments(arguments)
    command = bootstrap_command(sys.executable, script, words, as_module=module)
    os.execve(sys.executable, command, os.environ | variables)  # noqa: S606
