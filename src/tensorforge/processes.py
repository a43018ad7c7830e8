"""The identity of a process: which process is meant, whether it still runs, and signals to no other one.

A process number is not enough. The kernel gives it to another process later, every container counts from 1,
and so does the machine after a restart. A `ProcessIdentity` therefore names the host, the boot, the namespace
of process numbers (one per container), the number and the time of the start. The run's folder, leases,
claims on checkpoints and the members in the journal hold such identities. See docs/adr/0006.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

_TEXT = re.compile(
    r"pid=(?P<pid>\d+) started=(?P<started>-?\d+\.\d+)"
    r" namespace=(?P<namespace>\S*) boot=(?P<boot>\S*) host=(?P<host>.*)"
)
_TOLERANCE_SECONDS = 1.5
"""How far two readings of one process's start may lie apart: the kernel tells the boot in whole seconds."""
_NEVER = -1000.0
"""The start of a process that does not exist: long before the boot."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process.

    `started` counts seconds from the boot, so that setting the clock does not change it. `boot` and
    `namespace` are empty, and not compared, if the system or an older file does not have them.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: float

    @classmethod
    def current(cls) -> ProcessIdentity:
        """The calling process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The process that has this number now; if there is none, an identity that matches no process."""
        started = _seconds_from_boot(pid)
        if started is None:
            started = _NEVER
        return cls(socket.gethostname(), _boot(), _namespace(), pid, started)

    @classmethod
    def from_text(cls, text: str) -> ProcessIdentity | None:
        """The inverse of `to_text`; `None` for any other text."""
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        host, boot, namespace = found["host"], found["boot"], found["namespace"]
        return cls(host, boot, namespace, int(found["pid"]), float(found["started"]))

    @classmethod
    def from_clock_time(cls, pid: int, started_at: float) -> ProcessIdentity:
        """A process of this host from a file that has only its number and the clock time of its start."""
        return cls(socket.gethostname(), "", "", pid, round(started_at - psutil.boot_time(), 2))

    def to_text(self) -> str:
        """The identity as one line, for a column or an attribute that holds text."""
        return (
            f"pid={self.pid} started={self.started:.2f}"
            f" namespace={self.namespace} boot={self.boot} host={self.host}"
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_running(self) -> bool:
        """Whether the process runs on this host, in this container. One that waits to be reaped does not."""
        if not (self._is_of_this_boot() and _agree(self.namespace, _namespace())):
            return False
        started = _seconds_from_boot(self.pid)
        return started is not None and abs(started - self.started) <= _TOLERANCE_SECONDS

    def has_ended(self) -> bool:
        """Whether it is certain that the process has ended.

        A process on another host, or in another container of this host, cannot be seen, so `False`. A process
        of an earlier boot of this host has ended.
        """
        if self.host != socket.gethostname():
            return False
        if not self._is_of_this_boot():
            return True
        return _agree(self.namespace, _namespace()) and not self.is_running()

    def send_signal(self, number: int) -> bool:
        """Send a signal if the process runs, and return whether it was sent.

        Another process that has the same number by now never receives it.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            # The descriptor stays with one process, so the number cannot change hands after this check.
            if not self.is_running():
                return False
            signal.pidfd_send_signal(descriptor, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)

    def _is_of_this_boot(self) -> bool:
        return self.host == socket.gethostname() and _agree(self.boot, _boot())


def _agree(told: str, here: str) -> bool:
    return not told or not here or told == here


@functools.cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _seconds_from_boot(pid: int) -> float | None:
    """When the process with this number started; `None` if there is none, or only its exit code is left."""
    boot = psutil.boot_time()
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return round(process.create_time() - boot, 2)
    except psutil.NoSuchProcess:
        return None
