"""Where the registry may send requests on somebody's behalf: only to the public internet, unless allowed.

Whoever may create a webhook chooses the address. Without a check the server would carry requests to
places that the caller cannot reach: its own loopback, the cloud's metadata service, its neighbours.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from urllib.parse import SplitResult, urlsplit

from tensorforge.errors import InvalidInputError, PermissionDeniedError, UnavailableError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], list[str]]

_PORTS = {"http": 80, "https": 443}


def check_target(url: str, *, allow_private: bool = False) -> SplitResult:
    """The parts of a URL that a webhook may have.

    `InvalidInputError` if it is no plain http(s) URL; `PermissionDeniedError` if its host is spelled as
    an address that is out of bounds. A name is judged when it is resolved, each time.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
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
    """The address to connect to: resolved once, judged, and then used as it is.

    Resolving again when connecting would let a name change its answer in between. If any of the answers is
    out of bounds the name is refused.
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
    """Whether an address belongs to the public internet, whatever notation hides it."""
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
