"""A second host on this machine: a network namespace behind a link that can be interrupted.

    here (S.1) ── cable ── there (S.130)

The cable is a third namespace that forwards packets. While it is pulled, it drops them: both hosts keep their
addresses, and processes on the same side still reach each other. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from pathlib import Path
from typing import Self

from tensorforge.errors import UnavailableError

_NEW_NETWORK = 0x40000000


class DistantHost:
    """The second host, as a context manager; its processes run in the network namespace `namespace`."""

    def __init__(self) -> None:
        unique = f"{time.monotonic_ns() % 10**7}"
        subnet = f"10.{200 + os.getpid() % 50}.{time.monotonic_ns() // 1000 % 250}"
        self.namespace = f"tfh{unique}"
        self._cable = f"tfc{unique}"
        self._near, self._far = f"tfa{unique}", f"tfb{unique}"
        self._subnet = subnet
        self.here, self.there = f"{subnet}.1", f"{subnet}.130"

    @staticmethod
    def is_possible() -> bool:
        """Whether this process may create network namespaces."""
        try:
            probe = subprocess.run(
                ["unshare", "--net", "true"],  # noqa: S607
                capture_output=True,
                check=False,
            )
        except FileNotFoundError:
            return False
        return probe.returncode == 0

    def pull(self) -> None:
        """Interrupt the link between the hosts."""
        for end in ("near", "far"):
            _ip("-n", self._cable, "link", "set", end, "down")

    def plug(self) -> None:
        """Restore the link between the hosts."""
        for end in ("near", "far"):
            _ip("-n", self._cable, "link", "set", end, "up")

    def __enter__(self) -> Self:
        try:
            self._lay()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _lay(self) -> None:
        subnet, cable, host = self._subnet, self._cable, self.namespace
        for name in (cable, host):
            _ip("netns", "add", name)
        _ip("link", "add", self._near, "type", "veth", "peer", "name", "near", "netns", cable)
        _ip("link", "add", "far", "netns", cable, "type", "veth", "peer", "name", self._far)
        _ip("link", "set", self._far, "netns", host)
        _ip("addr", "add", f"{subnet}.1/25", "dev", self._near)
        _ip("-n", cable, "addr", "add", f"{subnet}.2/25", "dev", "near")
        _ip("-n", cable, "addr", "add", f"{subnet}.129/25", "dev", "far")
        _ip("-n", host, "addr", "add", f"{subnet}.130/25", "dev", self._far)
        _ip("netns", "exec", cable, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        _ip("link", "set", self._near, "up")
        _ip("-n", host, "link", "set", "lo", "up")
        _ip("-n", host, "link", "set", self._far, "up")
        self.plug()
        _ip("route", "add", f"{subnet}.128/25", "via", f"{subnet}.2")
        _ip("-n", host, "route", "add", "default", "via", f"{subnet}.129")

    def __exit__(self, *_: object) -> None:
        for name in (self.namespace, self._cable):
            if Path("/var/run/netns", name).exists():
                _ip("netns", "del", name)


def enter_namespace(name: str) -> None:
    """Move this process into the namespace; it must not have started threads or opened sockets yet."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/var/run/netns", name).open() as namespace:
        if libc.setns(namespace.fileno(), _NEW_NETWORK) != 0:
            raise UnavailableError(f"cannot enter {name}: {os.strerror(ctypes.get_errno())}")


def _ip(*words: str) -> None:
    done = subprocess.run(  # noqa: S603  fixed arguments
        ["ip", *words],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise UnavailableError(f"ip {' '.join(words)}: {done.stderr.strip()}")
