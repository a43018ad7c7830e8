"""`tensorforge worker`: join a run from anywhere."""

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
    Token,
    TokenFile,
    connect,
    locate,
    token_of,
)
from tensorforge.cli.run import script_arguments
from tensorforge.elastic.protocol.token_files import read_token
from tensorforge.errors import ConflictError, PermissionDeniedError
from tensorforge.launch.launch_settings import require_script

app = typer.Typer(help="Join a run from anywhere.")


@app.command(context_settings={"allow_interspersed_args": False})
def worker(
    script: Annotated[str, typer.Argument(help="The script that the other workers run, too.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Passed on to the script as they are.")
    ] = None,
    coordinator: Address = None,
    name: Annotated[
        str | None, typer.Option("--id", help="The worker's name; by default host and process.")
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")
    ] = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="The run's folder, if it can be reached from here: for logs, and to find it."
        ),
    ] = None,
    token: Token = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    json_output: AsJson = False,
) -> None:
    """Run SCRIPT as one more worker of the run that the coordinator leads.

    The process becomes the worker: SIGTERM or an interrupt makes it leave after its step, SIGUSR1 shows
    the script's stack, and its exit code is the script's.
    """
    if not module:
        require_script(script)
    coordinator, run_dir = locate(coordinator, run_dir)
    if token is None and token_file is None:
        token_file = token_of(run_dir)
    with connect(coordinator, token, token_file, ca, cert, key) as client:
        try:
            view = client.status()
        except PermissionDeniedError:
            view = None  # a token that may join need not be one that may look
    if view is not None and view.ended is not None:
        raise ConflictError(f"the run is over ({view.ended.outcome}): {view.ended.reason}")
    if token_file is not None:
        token = read_token(token_file)
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
    told = {"worker": chosen, "coordinator": coordinator, "pid": os.getpid()}
    typer.echo(json.dumps(told) if json_output else f"{chosen} joins {coordinator}")
    sys.stdout.flush()
    flag = ["-m"] if module else []
    command = [sys.executable, "-m", "tensorforge.launch.processes.bootstrap", *flag, script]
    os.execve(sys.executable, [*command, *script_arguments(arguments)], os.environ | variables)  # noqa: S606
