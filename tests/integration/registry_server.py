"""A real `tensorforge serve` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

from tensorforge.registry import ModelRegistry
from tensorforge.registry.tokens import DatabaseTokens, Scope


@dataclass(frozen=True)
class RunningServer:
    url: str
    database: str
    token: str
    pid: int

    def issue(self, *scopes: str) -> str:
        with ModelRegistry(self.database) as registry:
            return DatabaseTokens(registry.database).issue("limited", scopes)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_server(database: str, *options: str) -> Iterator[RunningServer]:
    with ModelRegistry(database) as registry:
        token = DatabaseTokens(registry.database).issue("root", [s.value for s in Scope])
    port = free_port()
    command = [sys.executable, "-m", "tensorforge", "serve", "--database", database]
    process = subprocess.Popen(
        [*command, "--port", str(port), *options],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, process)
        yield RunningServer(url, database, token, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        finally:
            # Its workers share the session that was started for it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        try:
            with urllib.request.urlopen(f"{url}/healthz", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.05)
    raise AssertionError("the server did not become healthy within a minute")
