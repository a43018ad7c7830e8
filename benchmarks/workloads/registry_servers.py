"""The servers that `benchmarks/registry.py` compares, what fills them, and the client that asks both.

The client writes HTTP/1.1 to a socket itself: a library's client costs more than our server does, and the
cost would hide the difference. It acknowledges at once (TCP_QUICKACK), because MLflow's server with
several workers sends its answers in two packets and would wait 40 ms for the acknowledgement of the first.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensorforge.registry import ModelRegistry
from tensorforge.registry.domain.names import tag_digest
from tensorforge.registry.tokens import DatabaseTokens, Scope

MLFLOW = "mlflow==3.17.2"
API = "/api/2.0/mlflow"
TAGGED_ALIKE = 10
"""So many versions have the same tag, however many versions there are."""
ALIASED = 5
"""So many models have an alias."""


class Client:
    """One connection that stays open; every answer must be a success."""

    def __init__(self, port: int, token: str = "") -> None:
        self._port = port
        self._head = (
            f"Host: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n"
            "Content-Type: application/json\r\n"
        )
        self._socket: socket.socket | None = None

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        content = b"" if body is None else json.dumps(body).encode()
        length = "" if body is None else f"Content-Length: {len(content)}\r\n"
        request = f"{method} {path} HTTP/1.1\r\n{self._head}{length}\r\n".encode() + content
        try:
            status, data = self._exchange(request)
        except (BrokenPipeError, ConnectionResetError):
            # A server may close a connection that was idle while another one was measured.
            self.close()
            status, data = self._exchange(request)
        if status >= 300:
            raise RuntimeError(f"{method} {path}: {status} {data[:300]!r}")
        return data

    def _exchange(self, request: bytes) -> tuple[int, bytes]:
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=120)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(request)
        received = b""
        while (end := received.find(b"\r\n\r\n")) < 0:
            received += self._receive()
        head = received[:end].lower()
        _, _, rest = head.partition(b"content-length:")
        whole = end + 4 + int(rest.split(b"\r\n", 1)[0])
        while len(received) < whole:
            received += self._receive()
        return int(head.split(b" ", 2)[1]), received[end + 4 :]

    def _receive(self) -> bytes:
        assert self._socket is not None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        data = self._socket.recv(1 << 18)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        return data

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server: where it is, and how many models and versions of each it holds."""

    port: int
    health: str
    token: str = ""
    models: int = 0
    versions_each: int = 0

    def client(self) -> Client:
        return Client(self.port, self.token)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _running(command: list[str], server: Server, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server in a session of its own, which ends with the block."""
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "server.log").open("wb") as log:
        command = [*command, "--port", str(server.port)]
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], server: Server, folder: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError((folder / "server.log").read_text()[-2000:])
        client = server.client()
        with contextlib.suppress(OSError, RuntimeError):
            client.call("GET", server.health)
            return
        client.close()
        time.sleep(0.2)
    raise RuntimeError(f"{folder.name} did not become healthy")


@contextlib.contextmanager
def our_server(folder: Path, models: int, versions: int) -> Iterator[Server]:
    """`tensorforge serve` with its defaults, except that it limits nobody's rate."""
    folder.mkdir()
    path = folder / "registry.db"
    with ModelRegistry(path) as registry:
        token = DatabaseTokens(registry.database).issue("bench", [s.value for s in Scope])
    server = Server(port=_free_port(), health="/healthz", token=token)
    command = [sys.executable, "-m", "tensorforge", "serve", "--database", str(path)]
    with _running([*command, "--rate", "1000000"], server, folder) as process:
        _wait_until_healthy(process, server, folder)
        _seed(server)
        _fill_ours(path, models, versions // models)
        _point_aliases(server)
        yield replace(server, models=models, versions_each=versions // models)


@contextlib.contextmanager
def mlflow_servers(
    folder: Path, venv: Path, workers: tuple[int | None, ...], models: int, versions: int
) -> Iterator[list[Server]]:
    """MLflow's server, once for each number of workers (`None` for its default), started at once."""
    with contextlib.ExitStack() as stack:
        started = []
        for count in workers:
            place = folder / f"mlflow-{count or 'default'}"
            place.mkdir()
            command = [str(venv / "bin" / "mlflow"), "server", "--host", "127.0.0.1"]
            command += ["--backend-store-uri", f"sqlite:///{place / 'mlflow.db'}"]
            command += [] if count is None else ["--workers", str(count)]
            server = Server(port=_free_port(), health="/health")
            process = stack.enter_context(_running(command, server, place))
            started.append((process, server, place))
        servers = []
        for process, server, place in started:
            _wait_until_healthy(process, server, place)
            _seed(server)
            _fill_mlflow(place / "mlflow.db", models, versions // models)
            _point_aliases(server)
            servers.append(replace(server, models=models, versions_each=versions // models))
        yield servers


def install_mlflow(venv: Path) -> None:
    if (venv / "bin" / "mlflow").exists():
        return
    print(f"installing {MLFLOW} into {venv}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    subprocess.run([str(venv / "bin" / "pip"), "install", "-q", MLFLOW], check=True)


def _seed(server: Server) -> None:
    """One model with one version through the front door: the rows that are copied."""
    client = server.client()
    client.call("POST", f"{API}/registered-models/create", {"name": "seed"})
    version = {"name": "seed", "source": "s3://b/seed", "tags": [{"key": "n", "value": "0"}]}
    client.call("POST", f"{API}/model-versions/create", version)
    client.close()


def _point_aliases(server: Server) -> None:
    client = server.client()
    for model in range(ALIASED):
        body = {"name": f"m{model}", "alias": "a", "version": "1"}
        client.call("POST", f"{API}/registered-models/alias", body)
    client.close()


def tag_of(model: int, number: int) -> str:
    """The value of a version's tag, which it shares with the versions beside it."""
    return f"m{model}-{number // TAGGED_ALIKE}"


def _fill_mlflow(path: Path, models: int, each: int) -> None:
    with contextlib.closing(sqlite3.connect(path, timeout=60)) as database, database:
        model = _template(database, "registered_models", "name = 'seed'")
        version = _template(database, "model_versions", "name = 'seed'")
        tag = _template(database, "model_version_tags", "name = 'seed'")
        places = [(m, n) for m in range(models) for n in range(each)]
        _copy(database, "registered_models", [{**model, "name": f"m{m}"} for m in range(models)])
        rows = [{**version, "name": f"m{m}", "version": n + 1} for m, n in places]
        _copy(database, "model_versions", rows)
        tags = [
            {**tag, "name": f"m{m}", "version": n + 1, "value": tag_of(m, n)} for m, n in places
        ]
        _copy(database, "model_version_tags", tags)


def _fill_ours(path: Path, models: int, each: int) -> None:
    with contextlib.closing(sqlite3.connect(path, timeout=60)) as database, database:
        model = _template(database, "registry_models", "model_id = 'seed'")
        version = _template(database, "registry_versions", "1")
        tag = _template(database, "registry_version_tags", "1")
        filled = {**model, "last_number": each, "version_count": each}
        rows = [{**filled, "key": 100 + m, "model_id": f"m{m}"} for m in range(models)]
        versions, tags = [], []
        for m in range(models):
            for n in range(each):
                key, value = 1_000 + m * each + n, tag_of(m, n)
                place = {"key": key, "model_key": 100 + m, "number": n + 1, "minor": n + 1}
                versions.append({**version, **place})
                digest = tag_digest(value)
                tags.append({**tag, "version_key": key, "value": value, "digest": digest})
        _copy(database, "registry_models", rows)
        _copy(database, "registry_versions", versions)
        _copy(database, "registry_version_tags", tags)


def _template(database: sqlite3.Connection, table: str, where: str) -> dict[str, Any]:
    database.row_factory = sqlite3.Row
    return dict(database.execute(f"SELECT * FROM {table} WHERE {where}").fetchone())


def _copy(database: sqlite3.Connection, table: str, rows: list[dict[str, Any]]) -> None:
    columns = list(rows[0])
    names, marks = ", ".join(columns), ", ".join("?" * len(columns))
    statement = f"INSERT INTO {table} ({names}) VALUES ({marks})"
    database.executemany(statement, [[row[name] for name in columns] for row in rows])
