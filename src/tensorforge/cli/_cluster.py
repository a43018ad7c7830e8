"""What the commands that talk to a coordinator share: options for address, token and TLS; the client."""

from __future__ import annotations

import functools
import getpass
import inspect
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import typer

from tensorforge import environment
from tensorforge.elastic.client import CoordinatorClient
from tensorforge.elastic.protocol.access import TlsOptions
from tensorforge.elastic.protocol.cluster_view import ClusterView
from tensorforge.elastic.protocol.token_files import read_token
from tensorforge.errors import InvalidInputError, NotFoundError, UnavailableError

Address = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        "-c",
        envvar=environment.COORDINATOR.name,
        help="HOST:PORT of the coordinator; by default that of the only run under ./runs.",
    ),
]
RunDir = Annotated[
    Path | None, typer.Option("--run-dir", help="The folder of a run started by `tensorforge run`.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help=f"A file with a token; by default the variable {environment.TOKEN.name}, or the run's own file.",
    ),
]
Ca = Annotated[
    Path | None,
    typer.Option(
        "--ca", envvar=environment.CA.name, help="PEM of the authority that signs the peers."
    ),
]
Cert = Annotated[
    Path | None,
    typer.Option("--cert", envvar=environment.CERT.name, help="PEM of our certificate."),
]
Key = Annotated[
    Path | None, typer.Option("--key", envvar=environment.KEY.name, help="PEM of its key.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def tls_options(ca: Path | None, cert: Path | None, key: Path | None) -> TlsOptions | None:
    """The TLS options, or `None` if no file is given."""
    if ca is None and cert is None and key is None:
        return None
    return TlsOptions(ca=ca, certificate=cert, key=key)


def locate(coordinator: str | None, run_dir: Path | None) -> tuple[str, Path | None]:
    """The coordinator's address, and the folder of its run if that is known.

    Without an address, the folder's record has it; without both, the only active run under `./runs`.
    """
    if coordinator is not None:
        return coordinator, run_dir
    from tensorforge.launch.run_directory import read_record

    folder = run_dir if run_dir is not None else _only_run()
    record = read_record(folder)
    if not record.launcher.is_running():
        raise NotFoundError(f"the run in {folder} is not active: its launcher has ended")
    if record.coordinator_address is None:
        raise UnavailableError(f"the run in {folder} has no coordinator yet; try again later")
    return record.coordinator_address, folder


def _only_run() -> Path:
    from tensorforge.launch.run_directory import running

    found = running(Path("runs"))
    if len(found) != 1:
        active = ", ".join(map(str, found)) or "none"
        raise InvalidInputError(
            f"name the run with --run-dir or --coordinator; active under ./runs: {active}"
        )
    return found[0]


def connect(
    coordinator: Address = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    run_dir: RunDir = None,
) -> CoordinatorClient:
    """A client for the coordinator that the options name."""
    coordinator, folder = locate(coordinator, run_dir)
    token = find_token(token_file, folder)
    return CoordinatorClient(coordinator, token=token, tls=tls_options(ca, cert, key))


def find_token(token_file: Path | None, folder: Path | None) -> str | None:
    """The token in the named file; without one, that of the environment, or of the run's folder.

    There is no option for the token itself: every user of the machine can read the process list.
    """
    from tensorforge.launch.run_directory import TOKEN_FILE

    if token_file is None:
        token = environment.TOKEN.read()
        if token is not None or folder is None or not (folder / TOKEN_FILE).exists():
            return token
        token_file = folder / TOKEN_FILE
    try:
        return read_token(token_file)
    except OSError as error:
        raise InvalidInputError(f"cannot read {token_file}: {error.strerror}") from error


def with_client(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `connect`, and pass it the client as its first argument."""
    shared = inspect.signature(connect).parameters
    own = list(inspect.signature(command).parameters.values())[1:]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = {name: given.pop(name) for name in shared}
        with connect(**options) as client:
            command(client, **given)

    hints = {
        **get_type_hints(connect, include_extras=True),
        **get_type_hints(command, include_extras=True),
    }
    parameters = [
        p.replace(kind=p.KEYWORD_ONLY, annotation=hints[p.name]) for p in (*own, *shared.values())
    ]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what Typer reads
    return run


def operator() -> str:
    """The name under which the coordinator records this user's requests."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def as_json(view: ClusterView) -> str:
    """The cluster's view as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(view), indent=2).decode()


def member_count(view: ClusterView) -> int:
    """How many workers the current generation has."""
    return sum(1 for worker in view.workers if worker.rank >= 0)
