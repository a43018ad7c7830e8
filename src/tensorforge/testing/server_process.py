"""A server that a test runs as a process in a temporary folder."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from tensorforge.errors import UnavailableError


class ServerProcess:
    """A running server. A subclass names its program and checks whether it is ready."""

    NAME: ClassVar[str]
    START_SECONDS: ClassVar[float]
    NOT_READY: ClassVar[type[Exception]]
    """What `_check_ready` raises while the server still starts."""

    process: subprocess.Popen[bytes]

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def kill(self) -> None:
        """End the process with SIGKILL, as a power failure would."""
        self.process.kill()
        self.process.wait()

    def wait_until_ready(self) -> None:
        """Return once the server is ready; `UnavailableError` if it ends or takes too long."""
        deadline = time.monotonic() + self.START_SECONDS
        while True:
            if self.process.poll() is not None:
                log = (self._folder / "log").read_text(errors="replace")
                raise UnavailableError(f"{self.NAME} ended: {log[-2000:]}")
            try:
                self._check_ready()
                return
            except self.NOT_READY as error:
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"{self.NAME} did not start in {self.START_SECONDS:.0f} s: {error}"
                    ) from error
            time.sleep(0.05)

    def _check_ready(self) -> None:
        raise NotImplementedError

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with (self._folder / "log").open("wb") as log:
            return subprocess.Popen(  # noqa: S603  the program is this environment's own
                command,
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


def free_ports(count: int) -> list[int]:
    """Different TCP ports that are free on 127.0.0.1 at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
