"""The registry beside an MLflow server: the same requests, by the same client, over HTTP, in one run.

Both servers keep their data in SQLite and hold 10,000 versions (filled by copying one registered row). The
limit is a request to our server that does nothing but touch the database. MLflow is installed into a
virtual environment of its own, in a temporary folder unless --mlflow-venv names one to keep.

    python benchmarks/registry.py [--quick] [--mlflow-venv FOLDER] [--without-mlflow]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tensorforge.registry import ModelRegistry
from tensorforge.registry.tokens import DatabaseTokens, Scope

MLFLOW = "mlflow==3.17.2"
READS_AIM, CREATES_AIM, FLAT_AIM = 10.0, 5.0, 1.5
API = "/api/2.0/mlflow"
MODELS = 100


class Client:
    """One connection that stays open; every answer must be a success."""

    def __init__(self, port: int, token: str = "") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        content = None if body is None else json.dumps(body)
        try:
            answer = self._exchange(method, path, content)
        except (BrokenPipeError, http.client.RemoteDisconnected, ConnectionResetError):
            # A server may close a connection that was idle while the other one was measured.
            self._connection.close()
            answer = self._exchange(method, path, content)
        data = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {data[:300]!r}")
        return data

    def _exchange(self, method: str, path: str, content: str | None) -> http.client.HTTPResponse:
        self._connection.request(method, path, body=content, headers=self._headers)
        return self._connection.getresponse()

    def close(self) -> None:
        self._connection.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], port: int, health: str, folder: Path) -> Iterator[int]:
    """A server in a session of its own, until it is healthy and then until the block ends."""
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait(process, port, health, folder)
            yield port
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, health: str, folder: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError((folder / "server.log").read_text()[-2000:])
        with contextlib.suppress(OSError, http.client.HTTPException, RuntimeError):
            client = Client(port)
            client.call("GET", health)
            client.close()
            return
        time.sleep(0.2)
    raise RuntimeError(f"{folder.name} did not become healthy")


def clone(database: sqlite3.Connection, table: str, rows: list[dict[str, Any]]) -> None:
    columns = list(rows[0])
    names, marks = ", ".join(columns), ", ".join("?" * len(columns))
    statement = f"INSERT INTO {table} ({names}) VALUES ({marks})"
    database.executemany(statement, [[row[name] for name in columns] for row in rows])


def template(database: sqlite3.Connection, table: str, where: str) -> dict[str, Any]:
    database.row_factory = sqlite3.Row
    return dict(database.execute(f"SELECT * FROM {table} WHERE {where}").fetchone())


def seed(client: Client) -> None:
    """One model with one version through the front door: the row that is copied."""
    client.call("POST", f"{API}/registered-models/create", {"name": "seed"})
    version = {"name": "seed", "source": "s3://b/seed", "tags": [{"key": "n", "value": "0"}]}
    client.call("POST", f"{API}/model-versions/create", version)


def fill_mlflow(path: Path, versions: int) -> None:
    with contextlib.closing(sqlite3.connect(path, timeout=60)) as database, database:
        model = template(database, "registered_models", "name = 'seed'")
        version = template(database, "model_versions", "name = 'seed'")
        tag = template(database, "model_version_tags", "name = 'seed'")
        names = [f"m{number}" for number in range(MODELS)]
        places = [(name, n) for name in names for n in range(1, versions // MODELS + 1)]
        clone(database, "registered_models", [{**model, "name": name} for name in names])
        clone(
            database,
            "model_versions",
            [{**version, "name": name, "version": n} for name, n in places],
        )
        clone(
            database,
            "model_version_tags",
            [{**tag, "name": m, "version": n, "value": f"{m}-{n % 10}"} for m, n in places],
        )


def fill_ours(path: Path, versions: int) -> None:
    from tensorforge.registry.names import tag_digest

    with contextlib.closing(sqlite3.connect(path, timeout=60)) as database, database:
        model = template(database, "registry_models", "model_id = 'seed'")
        version = template(database, "registry_versions", "1")
        tag = template(database, "registry_version_tags", "1")
        each = versions // MODELS
        models = [
            {
                **model,
                "key": 100 + m,
                "model_id": f"m{m}",
                "last_number": each,
                "version_count": each,
            }
            for m in range(MODELS)
        ]
        rows, tags = [], []
        for m in range(MODELS):
            for n in range(1, each + 1):
                key, value = 1_000 + m * each + n, f"m{m}-{n % 10}"
                rows.append({**version, "key": key, "model_key": 100 + m, "number": n, "minor": n})
                digest = tag_digest(value)
                tags.append({**tag, "version_key": key, "value": value, "digest": digest})
        clone(database, "registry_models", models)
        clone(database, "registry_versions", rows)
        clone(database, "registry_version_tags", tags)


def get(path: str, **parameters: str) -> str:
    return f"{API}/{path}?" + "&".join(f"{k}={quote(v)}" for k, v in parameters.items())


def operations(client: Client, unique: str, each: int) -> dict[str, Callable[[int], Any]]:
    """The measured requests, by what they do; each takes a number that makes it different."""

    def spread(number: int) -> tuple[str, str]:
        return f"m{number % MODELS}", str(number * 7 % each + 1)

    def version(number: int) -> Any:
        name, n = spread(number)
        return client.call("GET", get("model-versions/get", name=name, version=n))

    def alias(number: int) -> Any:
        return client.call("GET", get("registered-models/alias", name=f"m{number % 5}", alias="a"))

    def set_alias(number: int) -> Any:
        body = {"name": f"m{number % 5}", "alias": "a", "version": str(number % each + 1)}
        return client.call("POST", f"{API}/registered-models/alias", body)

    def search(number: int) -> Any:
        query = {"filter": f"name = 'm{number % MODELS}'", "max_results": "100"}
        return client.call("GET", get("model-versions/search", **query))

    def by_tag(number: int) -> Any:
        query = {"filter": f"tags.n = 'm{number % MODELS}-{number % 10}'", "max_results": "100"}
        return client.call("GET", get("model-versions/search", **query))

    def create_model(number: int) -> Any:
        name = {"name": f"new-{unique}-{number}"}
        return client.call("POST", f"{API}/registered-models/create", name)

    def create_version(number: int) -> Any:
        body = {"name": f"m{number % MODELS}", "source": "s3://b/x"}
        body |= {"tags": [{"key": "k", "value": "v"}]}  # type: ignore[dict-item]
        return client.call("POST", f"{API}/model-versions/create", body)

    return {
        "set alias": set_alias,
        "get version": version,
        "get by alias": alias,
        "search one model": search,
        "search by tag": by_tag,
        "create model": create_model,
        "create version": create_version,
    }


READS = ("get version", "get by alias", "search one model", "search by tag")
CREATES = ("create model", "create version")


def rate(run: Callable[[int], Any], first: int, count: int) -> float:
    started = time.perf_counter()
    for number in range(first, first + count):
        run(number)
    return count / (time.perf_counter() - started)


@contextlib.contextmanager
def our_server(folder: Path, versions: int) -> Iterator[Client]:
    folder.mkdir()
    path = folder / "registry.db"
    with ModelRegistry(path) as registry:
        token = DatabaseTokens(registry.database).issue("bench", [s.value for s in Scope])
    port = free_port()
    command = [sys.executable, "-m", "tensorforge", "serve", "--database", str(path)]
    command += ["--port", str(port), "--rate", "1000000"]
    with running(command, port, "/healthz", folder):
        client = Client(port, token)
        seed(client)
        fill_ours(path, versions)
        yield client
        client.close()


@contextlib.contextmanager
def mlflow_server(folder: Path, venv: Path, versions: int) -> Iterator[Client]:
    folder.mkdir()
    path = folder / "mlflow.db"
    port = free_port()
    command = [str(venv / "bin" / "mlflow"), "server", "--host", "127.0.0.1", "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{path}", "--port", str(port)]
    with running(command, port, "/health", folder):
        client = Client(port)
        seed(client)
        fill_mlflow(path, versions)
        yield client
        client.close()


def install_mlflow(venv: Path) -> None:
    if (venv / "bin" / "mlflow").exists():
        return
    print(f"installing {MLFLOW} into {venv}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    subprocess.run([str(venv / "bin" / "pip"), "install", "-q", MLFLOW], check=True)


def compare(folder: Path, venv: Path | None, versions: int, rounds: int) -> None:
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(our_server(folder / "ours", versions))
        peers = {"ours": ours}
        if venv is not None:
            peers["mlflow"] = stack.enter_context(mlflow_server(folder / "mlflow", venv, versions))
        each = versions // MODELS
        runs = {name: operations(client, name, each) for name, client in peers.items()}
        counts = {"ours": 100, "mlflow": 12}
        rates: dict[tuple[str, str], list[float]] = {}
        for turn in range(rounds):
            for operation in runs["ours"]:
                for peer, table in runs.items():
                    count = counts[peer]
                    peers[peer].call("GET", "/health" if peer == "mlflow" else "/healthz")
                    found = rate(table[operation], 1 + turn * count, count)
                    rates.setdefault((operation, peer), []).append(found)
            limit = rate(lambda _: ours.call("GET", "/healthz"), 0, 100)
            rates.setdefault(("limit", "ours"), []).append(limit)
        report(rates, versions)


def report(rates: dict[tuple[str, str], list[float]], versions: int) -> None:
    middle = {key: statistics.median(values) for key, values in rates.items()}
    limit = middle[("limit", "ours")]
    print(f"\noperations per second over HTTP at {versions:,} versions (median of rounds)")
    print(f"{'':18} {'ours':>9} {'MLflow':>9} {'ratio':>7} {'of limit':>9}  aim")
    for operation in dict.fromkeys(name for name, _ in rates if name != "limit"):
        ours, peer = middle[(operation, "ours")], middle.get((operation, "mlflow"))
        aim = READS_AIM if operation in READS else CREATES_AIM if operation in CREATES else None
        ratio = "" if peer is None else f"{ours / peer:.1f}x"
        verdict = ""
        if aim is not None and peer is not None:
            verdict = f">= {aim:g}x: {'met' if ours / peer >= aim else 'missed'}"
        shown = "" if peer is None else f"{peer:9.0f}"
        print(f"{operation:18} {ours:9.0f} {shown:>9} {ratio:>7} {ours / limit:9.2f}  {verdict}")
    print(f"{'limit (/healthz)':18} {limit:9.0f}")


def flatness(folder: Path, sizes: list[int], rounds: int) -> None:
    """Milliseconds per request at several sizes, the servers side by side."""
    with contextlib.ExitStack() as stack:
        clients = {
            size: stack.enter_context(our_server(folder / f"flat-{size}", size)) for size in sizes
        }
        runs = {s: operations(client, str(s), s // MODELS) for s, client in clients.items()}
        times: dict[tuple[str, int], list[float]] = {}
        for turn in range(rounds):
            for operation in runs[sizes[0]]:
                for size in sizes:
                    found = 1000 / rate(runs[size][operation], 1 + turn * 40, 40)
                    times.setdefault((operation, size), []).append(found)
    print("\nmilliseconds per request by number of versions (minimum of rounds)")
    print(f"{'':18}" + "".join(f"{size:>10,}" for size in sizes) + "    last/first  aim")
    for operation in dict.fromkeys(name for name, _ in times):
        best = [min(times[(operation, size)]) for size in sizes]
        ratio = best[-1] / best[0]
        verdict = "met" if ratio <= FLAT_AIM else "missed"
        if operation == "search one model":
            verdict = "(its answer grows with the versions per model, up to a page of 100)"
        else:
            verdict = f"<= {FLAT_AIM:g}: {verdict}"
        figures = "".join(f"{value:10.2f}" for value in best)
        print(f"{operation:18}{figures}    {ratio:10.2f}  {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller sizes")
    parser.add_argument("--mlflow-venv", type=Path, help="where MLflow is, or is to be installed")
    parser.add_argument("--without-mlflow", action="store_true", help="measure ours alone")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tensorforge-registry-bench-"))
    try:
        venv = None if chosen.without_mlflow else chosen.mlflow_venv or folder / "venv"
        if venv is not None:
            install_mlflow(venv)
        rounds = 3 if chosen.quick else 7
        compare(folder, venv, 10_000, rounds)
        flatness(folder, [1_000, 10_000] if chosen.quick else [1_000, 10_000, 100_000], rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
