"""The addresses to which webhook messages may be sent: those of the public internet, unless others are allowed.

A caller who creates a webhook chooses its URL. Without a check, the server would send requests for that caller
to addresses that the caller cannot reach: the server's loopback, the cloud's metadata service, machines next to
it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from urllib.parse import SplitResult, urlsplit

import httpx

from tensorforge.errors import InvalidInputError, PermissionDeniedError, UnavailableError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], list[str]]

_PORTS = {"http": 80, "https": 443}


def check_target(url: str, *, allow_private: bool = False) -> SplitResult:
    """The parts of a webhook's URL.

    `InvalidInputError` if it is no plain http or https URL; `PermissionDeniedError` if its host is an IP
    address outside the public internet. A host name is checked each time it is resolved, by `resolve_target`.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL) as error:
        raise InvalidInputError(f"{url[:80]!r} is not a URL: {error}") from error
    if parts.scheme not in _PORTS or not parts.hostname:
        raise InvalidInputError(f"{url[:80]!r}: a webhook needs an http or https URL with a host")
    if parts.username is not None or parts.password is not None:
        raise InvalidInputError("a webhook's URL must not carry a user or password")
    if any(character.isspace() or not character.isprintable() for character in url) or port == 0:
        raise InvalidInputError(f"{url[:80]!r} is not a URL that a request can be sent to")
    try:
        literal = ipaddress.ip_address(parts.hostname)
    except ValueError:
        return parts
    if not allow_private:
        _require_public(literal, parts.hostname)
    return parts


def resolve_target(
    parts: SplitResult, *, allow_private: bool = False, resolver: Resolver | None = None
) -> str:
    """The IP address to connect to.

    The caller must connect to this address and not resolve the name again, since the second answer could be
    another one. `PermissionDeniedError` if any address of the name is outside the public internet.
    """
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    found = (resolver or _system_resolver)(host, port)
    if not found:
        raise UnavailableError(f"{host} has no address")
    if not allow_private:
        for address in found:
            _require_public(ipaddress.ip_address(address.split("%", 1)[0]), host)
    return found[0]


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet.

    IPv4 addresses inside IPv6 notations are recognised.
    """
    if isinstance(address, ipaddress.IPv6Address):
        hidden = address.ipv4_mapped or address.sixtofour
        if address.teredo is not None or address in ipaddress.ip_network("64:ff9b::/96"):
            return False
        if hidden is not None:
            return is_public(hidden)
    return address.is_global and not address.is_multicast


def _require_public(address: Address, host: str) -> None:
    if not is_public(address):
        raise PermissionDeniedError(
            f"{host} is at {address}, which is not on the public internet; "
            "start the server with --allow-private-webhooks to allow it"
        )


def _system_resolver(host: str, port: int) -> list[str]:
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UnavailableError(f"{host} cannot be resolved: {error}") from error
    return [str(answer[4][0]) for answer in answers]
