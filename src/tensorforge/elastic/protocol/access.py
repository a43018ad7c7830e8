"""Who may call the coordinator, and how the connection is protected.

A token has roles: `join` (workers), `observe` (status and watch) and `control` (scale, remove, stop). Without
tokens the coordinator listens on loopback only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tensorforge.errors import AuthenticationError, ConfigurationError, InvalidInputError
from tensorforge.security import TokenStore

JOIN = "join"
OBSERVE = "observe"
CONTROL = "control"
ROLES = (JOIN, OBSERVE, CONTROL)

_HEADER = "authorization"
_SCHEME = "Bearer "


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """Paths of PEM files. `ca` verifies the other side; `certificate` and `key` identify this side.

    A server needs `certificate` and `key`; with `ca` it requires certificates of its clients as well (mutual
    TLS). A client needs `ca`, and the other two for mutual TLS. `server_name` is the expected name in the
    server's certificate if it differs from the address.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    def server_credentials(self) -> Any:
        """The credentials for a gRPC server."""
        if self.certificate is None or self.key is None:
            raise InvalidInputError("tls: a server needs both a certificate and a key")
        pair = (_read("key", self.key), _read("certificate", self.certificate))
        root = _read("ca", self.ca)
        return grpc.ssl_server_credentials(
            [pair], root_certificates=root, require_client_auth=root is not None
        )

    def channel_credentials(self) -> Any:
        """The credentials for a gRPC client."""
        if self.ca is None:
            raise InvalidInputError("tls: a client needs the certificate of the authority (ca)")
        if (self.certificate is None) != (self.key is None):
            raise InvalidInputError("tls: certificate and key go together")
        return grpc.ssl_channel_credentials(
            root_certificates=_read("ca", self.ca),
            private_key=_read("key", self.key),
            certificate_chain=_read("certificate", self.certificate),
        )


def _read(what: str, path: Path | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise InvalidInputError(f"tls: cannot read the {what} {path}: {error.strerror}") from error


def is_loopback(host: str) -> bool:
    """Whether only processes on this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Authorizer:
    """Checks the token of each call. Without tokens every call is allowed, which only loopback permits."""

    def __init__(self, tokens: TokenStore | None, *, host: str) -> None:
        if tokens is None and not is_loopback(host):
            raise ConfigurationError(
                "host", host, "is reachable from other machines, so a job token is required"
            )
        self._tokens = tokens

    def authorize(self, metadata: Iterable[tuple[str, str | bytes]], role: str) -> None:
        """Raise an error that says why if the call has no token with this role."""
        if self._tokens is None:
            return
        for key, value in metadata:
            if key == _HEADER and isinstance(value, str) and value.startswith(_SCHEME):
                self._tokens.authorize(value[len(_SCHEME) :], role)
                return
        raise AuthenticationError("a token is required; none was sent")


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """The header of a call that carries the token."""
    return () if token is None else ((_HEADER, f"{_SCHEME}{token}"),)


def open_channel(
    address: str, tls: TlsOptions | None, options: Iterable[tuple[str, Any]] = ()
) -> Any:
    """Open a gRPC channel to the coordinator."""
    settings = [*options, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    if tls is None:
        return grpc.insecure_channel(address, settings)
    if tls.server_name is not None:
        settings.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.secure_channel(address, tls.channel_credentials(), settings)
