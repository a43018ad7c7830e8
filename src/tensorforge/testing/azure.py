"""A real server of Azure's blob protocol on this machine, for tests: Azurite in a temporary folder."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

from tensorforge.errors import UnavailableError
from tensorforge.storage.object_store import ObjectStore

CONTAINER = "tests"
ACCOUNT = "tensorforge"
_VERSION = "2021-12-02"
_START_SECONDS = 60.0


class AzureServer:
    """A running server. `store()` opens a part of its container that nobody else uses."""

    def __init__(self, folder: Path, program: str) -> None:
        self._folder = folder
        self._port = _free_port()
        self.key = base64.b64encode(secrets.token_bytes(64)).decode()
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603  the program is this environment's own
                [program, *self._arguments()],
                cwd=folder,
                env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{self.key}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def endpoint(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self._port}/{ACCOUNT}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which `open_store("az://tests/...")` finds this server."""
        return {
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
        }

    def store(self, prefix: str | None = None, **options: Any) -> ObjectStore:
        """A store of its own below `prefix` (a new one by default)."""
        config = {"endpoint": self.endpoint, "account_name": ACCOUNT, "account_key": self.key}
        chosen: dict[str, Any] = {"config": config, "retry_seconds": 2.0} | options
        return ObjectStore(f"az://{CONTAINER}/{prefix or uuid.uuid4().hex}", **chosen)

    def kill(self) -> None:
        """End it at once, as a power cut would."""
        self.process.kill()
        self.process.wait()

    def wait_until_ready(self) -> None:
        """Return once its container exists; `UnavailableError` if it never does."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            if self.process.poll() is not None:
                raise UnavailableError(f"Azurite ended: {self._last_words()}")
            try:
                self._make_container()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"Azurite did not start in {_START_SECONDS:.0f} s: {error}"
                    ) from error
            time.sleep(0.05)

    def _arguments(self) -> list[str]:
        return [
            "--blobHost=127.0.0.1",
            f"--blobPort={self._port}",
            f"--location={self._folder}",
            "--silent",
            "--disableTelemetry",
            "--skipApiVersionCheck",
        ]

    def _make_container(self) -> None:
        """The one request that stores have no need of, signed as the protocol asks."""
        date = formatdate(usegmt=True)
        lines = [
            "PUT",
            *[""] * 11,
            f"x-ms-date:{date}",
            f"x-ms-version:{_VERSION}",
            f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}",
            "restype:container",
        ]
        key = base64.b64decode(self.key)
        signature = hmac.digest(key, "\n".join(lines).encode(), hashlib.sha256)
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        with contextlib.closing(connection):
            connection.request(
                "PUT",
                f"/{ACCOUNT}/{CONTAINER}?restype=container",
                headers={
                    "Content-Length": "0",
                    "x-ms-date": date,
                    "x-ms-version": _VERSION,
                    "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}",
                },
            )
            status = connection.getresponse().status
        if status != http.HTTPStatus.CREATED:
            raise UnavailableError(f"Azurite made no container: status {status}")

    def _last_words(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-2000:]


def azurite_program() -> str:
    """Where Azurite is; `UnavailableError` that says how to get it, if it is nowhere."""
    beside = Path(sys.prefix) / "azurite/node_modules/.bin/azurite-blob"
    found = str(beside) if beside.exists() else shutil.which("azurite-blob")
    if found is None or shutil.which("node") is None:
        raise UnavailableError("Azurite is not installed: make azurite (it needs node and npm)")
    return found


@contextlib.contextmanager
def running_azure() -> Iterator[AzureServer]:
    """Start a server, yield it when it is ready, stop it and remove its folder."""
    program = azurite_program()
    folder = Path(tempfile.mkdtemp(prefix="tensorforge-azure-"))
    server = None
    try:
        server = AzureServer(folder, program)
        server.wait_until_ready()
        yield server
    finally:
        if server is not None:
            server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
