"""A server of Azure's blob protocol on this machine, for tests: Azurite in a temporary folder."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import os
import secrets
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

from tensorforge.errors import UnavailableError
from tensorforge.storage.object_store import ObjectStore
from tensorforge.testing.server_process import ServerProcess, free_ports

CONTAINER = "tests"
ACCOUNT = "tensorforge"
_VERSION = "2021-12-02"


class AzureServer(ServerProcess):
    """A running server. `store()` opens a part of its container that no other test uses."""

    NAME = "Azurite"
    START_SECONDS = 60.0
    NOT_READY = OSError

    def __init__(self, folder: Path, program: str) -> None:
        super().__init__(folder)
        (self._port,) = free_ports(1)
        self.key = base64.b64encode(secrets.token_bytes(64)).decode()
        accounts = {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{self.key}"}
        self.process = self._start([program, *self._arguments()], {**os.environ, **accounts})

    @property
    def endpoint(self) -> str:
        """The URL of the server."""
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
        """A store below `prefix`, by default a new one."""
        config = {"endpoint": self.endpoint, "account_name": ACCOUNT, "account_key": self.key}
        chosen: dict[str, Any] = {"config": config, "retry_seconds": 2.0} | options
        return ObjectStore(f"az://{CONTAINER}/{prefix or uuid.uuid4().hex}", **chosen)

    def _arguments(self) -> list[str]:
        return [
            "--blobHost=127.0.0.1",
            f"--blobPort={self._port}",
            f"--location={self._folder}",
            "--silent",
            "--disableTelemetry",
            "--skipApiVersionCheck",
        ]

    def _check_ready(self) -> None:
        """Create the container; stores do not need this request, so it is signed here."""
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
            raise UnavailableError(f"Azurite did not create the container: status {status}")


def azurite_program() -> str:
    """The path of Azurite; an `UnavailableError` that says how to install it if it is missing."""
    beside = Path(sys.prefix) / "azurite/node_modules/.bin/azurite-blob"
    found = str(beside) if beside.exists() else shutil.which("azurite-blob")
    if found is None or shutil.which("node") is None:
        raise UnavailableError("Azurite is not installed: make azurite (it needs node and npm)")
    return found


@contextlib.contextmanager
def running_azure() -> Iterator[AzureServer]:
    """Start a server, yield it once it is ready, end it and remove its folder."""
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
