"""What the commands that talk to a coordinator have in common: address, token, TLS, how they answer."""

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
        help="HOST:PORT of the coordinator; without it and --run-dir, of the one run under ./runs.",
    ),
]
RunDir = Annotated[
    Path | None, typer.Option("--run-dir", help="The folder of a run started by `tensorforge run`.")
]
Token = Annotated[
    str | None,
    typer.Option("--token", envvar=environment.TOKEN.name, help="A token.", show_envvar=True),
]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="A file with a token.")]
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
    """TLS if any of its files is given."""
    if ca is None and cert is None and key is None:
        return None
    return TlsOptions(ca=ca, certificate=cert, key=key)


def locate(coordinator: str | None, run_dir: Path | None) -> tuple[str, Path | None]:
    """The coordinator's address, and the folder of its run if that is known.

    Without an address the folder tells it; without both, the only run that goes on under `./runs`.
    """
    if coordinator is not None:
        return coordinator, run_dir
    from tensorforge.launch.run_directory import read_record

    folder = run_dir if run_dir is not None else _only_run()
    record = read_record(folder)
    if not record.launcher.is_running():
        raise NotFoundError(f"nothing runs in {folder} any more: its launcher has ended")
    if record.coordinator_address is None:
        raise UnavailableError(f"the run in {folder} has no coordinator yet; try again later")
    return record.coordinator_address, folder


def _only_run() -> Path:
    from tensorforge.launch.run_directory import running

    found = running(Path("runs"))
    if len(found) != 1:
        there = ": " + ", ".join(map(str, found)) if found else " none"
        raise InvalidInputError(
            f"which run? name its --run-dir or its --coordinator; under ./runs there is{there}"
        )
    return found[0]


def connect(
    coordinator: Address = None,
    token: Token = None,
    token_file: TokenFile = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    run_dir: RunDir = None,
) -> CoordinatorClient:
    """A client for the coordinator that the options name."""
    if token is not None and token_file is not None:
        raise InvalidInputError("--token and --token-file exclude each other")
    coordinator, folder = locate(coordinator, run_dir)
    if token is None and token_file is None:
        token_file = token_of(folder)
    if token_file is not None:
        try:
            token = read_token(token_file)
        except OSError as error:
            raise InvalidInputError(f"cannot read {token_file}: {error.strerror}") from error
    return CoordinatorClient(coordinator, token=token, tls=tls_options(ca, cert, key))


def token_of(folder: Path | None) -> Path | None:
    """The file with the token of the run in this folder, if it needs one."""
    from tensorforge.launch.run_directory import TOKEN_FILE

    path = None if folder is None else folder / TOKEN_FILE
    return path if path is not None and path.exists() else None


def with_client(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `connect`, and hand it the client in place of its first parameter."""
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
    """Who asks, as the records will say."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def as_json(view: ClusterView) -> str:
    """The view as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(view), indent=2).decode()


def member_count(view: ClusterView) -> int:
    """How many workers the current generation has."""
    return sum(1 for worker in view.workers if worker.rank >= 0)
