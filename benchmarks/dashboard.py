"""The dashboard: time to the first byte of large pages beside MLflow's backend, and what 50 watchers cost.

    python benchmarks/dashboard.py [--quick] [--part pages|watchers] [--without-mlflow] [--mlflow-venv FOLDER]

"pages": the list of 1,000 runs, and a run with 100,000 steps; the first request after the start
("cold") and the median of later ones. MLflow answers the same questions of its own page: search 1,000 runs,
and the history of a metric with as many values, up to 25,000, its largest answer.
"watchers": a run without torch is watched by nobody and by 50 connections, in turns. The coordinator's
share of a core and the steps per second are printed for both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from tensorforge.launch.run_directory import RunRecord, read_record, write_record
from tensorforge.processes import ProcessIdentity

TENSORFORGE = [sys.executable, "-m", "tensorforge"]
TOY = Path(__file__).parents[1] / "tests" / "integration" / "toy_train.py"
FIRST_BYTE_MS = 100
WATCHERS = 50


@contextlib.contextmanager
def served(runs: Path) -> Iterator[httpx.Client]:
    """A dashboard over these runs, and a client that is signed in."""
    command = [*TENSORFORGE, "dashboard", str(runs), "--port", "0", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        facts = json.loads(server.stdout.readline())
        limits = httpx.Limits(max_connections=2 * WATCHERS)
        with httpx.Client(base_url=facts["url"], limits=limits, timeout=60) as client:
            for _ in range(600):
                with contextlib.suppress(httpx.TransportError):
                    if client.post("/sign-in", data={"token": facts["read_token"]}).is_redirect:
                        break
                time.sleep(0.05)
            yield client
    finally:
        server.terminate()
        server.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def write_run(folder: Path, steps: int) -> None:
    folder.mkdir(parents=True)
    write_record(folder, RunRecord(script="train.py", launcher=ProcessIdentity.of(2**30)))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            metrics = {"loss": 3 / (step + 1) ** 0.3, "accuracy": 1 - 1 / (step + 2)}
            facts = {"step": step, "epoch": 0, "generation": 1 + step // 5000, "samples": 64}
            line = {"time": 1.7e9 + step, "world_size": 3, **facts, "learning_rate": 1e-3}
            file.write(json.dumps({**line, "metrics": metrics, "is_skipped": False}) + "\n")


def first_byte_ms(client: httpx.Client, path: str) -> float:
    started = time.perf_counter()
    with client.stream("GET", path) as answer:
        parts = answer.iter_raw()
        next(parts)
        elapsed = time.perf_counter() - started
        assert answer.status_code == 200, answer.status_code
        for _ in parts:
            pass
    return elapsed * 1000


def measure(client: httpx.Client, name: str, path: str, repeats: int) -> None:
    cold = first_byte_ms(client, path)
    warm = statistics.median(first_byte_ms(client, path) for _ in range(repeats))
    print(f"{name:32} cold {cold:7.1f} ms   later {warm:7.1f} ms   (limit {FIRST_BYTE_MS} ms)")


def pages(quick: bool, mlflow: Path | None) -> None:
    runs, steps = (100, 10_000) if quick else (1_000, 100_000)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(runs):
            write_run(Path(folder) / "many" / f"run-{number:04}", 3)
        write_run(Path(folder) / "long" / "long", steps)
        with served(Path(folder) / "many") as client:
            measure(client, f"list of {runs} runs", "/runs", 20)
        with served(Path(folder) / "long") as client:
            measure(client, f"run with {steps} steps", "/runs/long", 20)
    if mlflow is not None:
        mlflow_pages(mlflow, runs, min(steps, 25_000))


FILL_MLFLOW = """
import sys, time
from mlflow import MlflowClient
from mlflow.entities import Metric
client = MlflowClient(sys.argv[1])
experiment = client.create_experiment("bench")
for number in range(int(sys.argv[2])):
    run = client.create_run(experiment).info.run_id
    client.log_batch(run, [Metric("loss", 1.0, 1, s) for s in range(3)])
long = client.create_run(experiment).info.run_id
for first in range(0, int(sys.argv[3]), 1000):
    client.log_batch(long, [Metric("loss", 1.0, 1, s) for s in range(first, first + 1000)])
print(experiment, long)
"""


def mlflow_pages(venv: Path, runs: int, steps: int) -> None:
    from workloads.registry_servers import install_mlflow

    install_mlflow(venv)
    python = venv / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        store = f"sqlite:///{folder}/mlflow.db"
        filled = subprocess.run(
            [str(python), "-c", FILL_MLFLOW, store, str(runs), str(steps)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        experiment, run = filled.stdout.split()
        from tensorforge.dashboard.dashboard_server import free_port

        port = free_port()
        command = [str(python), "-m", "mlflow", "server", "--backend-store-uri", store]
        server = subprocess.Popen(
            [*command, "--port", str(port), "--host", "127.0.0.1"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            _ask_mlflow(f"http://127.0.0.1:{port}/api/2.0/mlflow", experiment, run, runs, steps)
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(30)


def _ask_mlflow(base: str, experiment: str, run: str, runs: int, steps: int) -> None:
    with httpx.Client(timeout=120) as client:
        search = {"experiment_ids": [experiment], "max_results": runs}
        history = {"run_id": run, "metric_key": "loss", "max_results": steps}
        for _ in range(1200):
            with contextlib.suppress(httpx.TransportError):
                if client.post(f"{base}/runs/search", json=search).is_success:
                    break
            time.sleep(0.1)
        for name, ask in (
            (
                f"MLflow: search {runs} runs",
                lambda: client.post(f"{base}/runs/search", json=search),
            ),
            (
                f"MLflow: {steps} values",
                lambda: client.get(f"{base}/metrics/get-history", params=history),
            ),
        ):
            times = []
            for _ in range(5):
                started = time.perf_counter()
                assert ask().is_success
                times.append((time.perf_counter() - started) * 1000)
            print(f"{name:32} median {statistics.median(times):7.1f} ms")


def watchers(quick: bool) -> None:
    seconds, turns = (3.0, 1) if quick else (15.0, 5)
    with tempfile.TemporaryDirectory() as folder:
        stop, run = Path(folder) / "stop", Path(folder) / "runs" / "run"
        command = [*TENSORFORGE, "run", "--json", "-n", "2", "--run-dir", str(run), str(TOY)]
        launcher = subprocess.Popen([*command, "--until", str(stop)], stdout=subprocess.DEVNULL)
        try:
            while not (run / "workers").exists():
                time.sleep(0.1)
            time.sleep(3)
            with served(run.parent) as client:
                _measure_watchers(client, run, seconds, turns)
        finally:
            stop.touch()
            launcher.wait(60)


def _measure_watchers(client: httpx.Client, run: Path, seconds: float, turns: int) -> None:
    found: dict[int, list[tuple[float, float]]] = {0: [], WATCHERS: []}
    for _ in range(turns):
        for count, pairs in found.items():
            with watching(client, count):
                pairs.append(_share_and_rate(run, seconds))
    for count, pairs in found.items():
        share, rate = (statistics.median(values) for values in zip(*pairs, strict=True))
        print(f"{count:3} watchers: coordinator {share:6.2%} of a core, {rate:7.2f} steps/s")
    alone, watched = (statistics.median(r for _, r in pairs) for pairs in found.values())
    share = statistics.median(s for s, _ in found[WATCHERS]) - statistics.median(
        s for s, _ in found[0]
    )
    print(f"50 watchers cost {share:.2%} of a core (limit 5 %)")
    print(f"and {1 - watched / alone:.2%} of the steps (limit 1 %)")


@contextlib.contextmanager
def watching(client: httpx.Client, count: int) -> Iterator[None]:
    ends = threading.Event()

    def watch() -> None:
        with client.stream("GET", "/runs/run/events") as answer:
            assert answer.status_code == 200
            for _ in answer.iter_raw():
                if ends.is_set():
                    return

    threads = [threading.Thread(target=watch) for _ in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def _share_and_rate(run: Path, seconds: float) -> tuple[float, float]:
    coordinator = psutil.Process(read_record(run).coordinator.pid)
    log = run / "workers" / "worker-0.jsonl"

    def now() -> tuple[float, int]:
        times = coordinator.cpu_times()
        return times.user + times.system, log.read_bytes().count(b'"kind": "commit"')

    before, started = now(), time.perf_counter()
    time.sleep(seconds)
    after, elapsed = now(), time.perf_counter() - started
    return (after[0] - before[0]) / elapsed, (after[1] - before[1]) / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=["pages", "watchers"])
    parser.add_argument("--without-mlflow", action="store_true")
    parser.add_argument("--mlflow-venv", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mlflow = None if given.without_mlflow else given.mlflow_venv or Path(folder) / "mlflow"
        if given.part in (None, "pages"):
            pages(given.quick, mlflow)
    if given.part in (None, "watchers"):
        watchers(given.quick)


if __name__ == "__main__":
    main()
