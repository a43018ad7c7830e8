"""What the commands that talk to a coordinator have in common: address, token, TLS, tables."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tensorforge.elastic.access import TlsOptions
from tensorforge.elastic.client import CoordinatorClient
from tensorforge.elastic.token_files import read_token
from tensorforge.elastic.view import ClusterView
from tensorforge.errors import InvalidInputError

Address = Annotated[
    str,
    typer.Option(
        "--coordinator",
        "-c",
        envvar="TENSORFORGE_COORDINATOR",
        help="HOST:PORT of the coordinator.",
    ),
]
Token = Annotated[
    str | None,
    typer.Option("--token", envvar="TENSORFORGE_TOKEN", help="A token.", show_envvar=True),
]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="A file with a token.")]
Ca = Annotated[
    Path | None,
    typer.Option(
        "--ca", envvar="TENSORFORGE_CA", help="PEM of the authority that signs the peers."
    ),
]
Cert = Annotated[
    Path | None, typer.Option("--cert", envvar="TENSORFORGE_CERT", help="PEM of our certificate.")
]
Key = Annotated[
    Path | None, typer.Option("--key", envvar="TENSORFORGE_KEY", help="PEM of its key.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def tls_options(ca: Path | None, cert: Path | None, key: Path | None) -> TlsOptions | None:
    """TLS if any of its files is given."""
    if ca is None and cert is None and key is None:
        return None
    return TlsOptions(ca=ca, certificate=cert, key=key)


def connect(
    address: str,
    token: str | None,
    token_file: Path | None,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
) -> CoordinatorClient:
    """A client for the coordinator that the options name."""
    if token is not None and token_file is not None:
        raise InvalidInputError("--token and --token-file exclude each other")
    if token_file is not None:
        try:
            token = read_token(token_file)
        except OSError as error:
            raise InvalidInputError(f"cannot read {token_file}: {error.strerror}") from error
    return CoordinatorClient(address, token=token, tls=tls_options(ca, cert, key))


def operator() -> str:
    """Who asks, as the records will say."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def as_json(view: ClusterView) -> str:
    """The view as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(view), indent=2).decode()
