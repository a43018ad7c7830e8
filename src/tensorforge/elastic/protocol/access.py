"""Who may talk to the coordinator, and how the talk is protected.

Three roles are token scopes: `join` (workers), `observe` (status and watching) and `control` (scaling,
removing, stopping). Without tokens the coordinator listens on loopback only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tensorforge.errors import AuthenticationError, ConfigurationError, InvalidInputError
from tensorforge.security import TokenRecord, TokenStore

JOIN = "join"
OBSERVE = "observe"
CONTROL = "control"
ROLES = (JOIN, OBSERVE, CONTROL)

_HEADER = "authorization"
_SCHEME = "Bearer "


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """PEM files. `ca` verifies the other side; `certificate` and `key` prove who this side is.

    A server needs `certificate` and `key`; with `ca` it demands a certificate of its clients, too (mutual
    TLS). A client needs `ca`, and the other two for mutual TLS. `server_name` is the name to look for in the
    server's certificate where it differs from the address.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    def server_credentials(self) -> Any:
        """What a gRPC server takes."""
        if self.certificate is None or self.key is None:
            raise InvalidInputError("tls: a server needs both a certificate and a key")
        pair = (_read("key", self.key), _read("certificate", self.certificate))
        root = None if self.ca is None else _read("ca", self.ca)
        return grpc.ssl_server_credentials(
            [pair], root_certificates=root, require_client_auth=root is not None
        )

    def channel_credentials(self) -> Any:
        """What a gRPC client takes."""
        if self.ca is None:
            raise InvalidInputError("tls: a client needs the certificate of the authority (ca)")
        if (self.certificate is None) != (self.key is None):
            raise InvalidInputError("tls: certificate and key go together")
        return grpc.ssl_channel_credentials(
            root_certificates=_read("ca", self.ca),
            private_key=None if self.key is None else _read("key", self.key),
            certificate_chain=None
            if self.certificate is None
            else _read("certificate", self.certificate),
        )


def _read(what: str, path: Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidInputError(f"tls: cannot read the {what} {path}: {error.strerror}") from error


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Gate:
    """Checks each call: a token with the right role, or no tokens at all on loopback."""

    def __init__(self, tokens: TokenStore | None, *, host: str) -> None:
        if tokens is None and not is_loopback(host):
            raise ConfigurationError(
                "host", host, "is reachable from other machines, so a job token is required"
            )
        self._tokens = tokens

    def admit(self, metadata: Iterable[tuple[str, str | bytes]], role: str) -> TokenRecord | None:
        """The token behind the call, `None` if tokens are off; otherwise an error that says why."""
        if self._tokens is None:
            return None
        for key, value in metadata:
            if key == _HEADER and isinstance(value, str) and value.startswith(_SCHEME):
                return self._tokens.authorize(value[len(_SCHEME) :], role)
        raise AuthenticationError("a token is required; none was sent")


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """The header that carries the token."""
    return () if token is None else ((_HEADER, f"{_SCHEME}{token}"),)


def open_channel(
    address: str, tls: TlsOptions | None, options: Iterable[tuple[str, Any]] = ()
) -> Any:
    """A gRPC channel to the coordinator."""
    settings = [*options, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    if tls is None:
        return grpc.insecure_channel(address, settings)
    if tls.server_name is not None:
        settings.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.secure_channel(address, tls.channel_credentials(), settings)
