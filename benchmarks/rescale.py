"""From a failure to the next committed step: ours beside torchrun's restart and torchft, in one run.

    python benchmarks/rescale.py [--quick]

Four workers train a tiny model. One is killed with kill -9, again and again; the clock runs from the kill
until a survivor has committed a step. torchft is installed into a throw-away environment; if that does not
work, its line says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from tensorforge.elastic import AdaptationStrategy, ElasticTrainingConfig
from tensorforge.elastic.client import CoordinatorClient
from tensorforge.encoding import encode
from tensorforge.statistics import percentile
from tensorforge.testing.training_cluster import TrainingCluster

WORKERS = 4
FOREVER = 10_000_000
STABILITY_MS = 50
CONFIG = ElasticTrainingConfig(
    lr_adaptation_strategy=AdaptationStrategy.NONE,
    stability_window_ms=STABILITY_MS,
    worker_heartbeat_timeout_ms=1500,
    failure_tolerance_percentage=100,
    max_consecutive_failures=100,
)


def model_and_data():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))


def our_worker() -> None:
    from tensorforge.train import Run, RunConfig

    model, data = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Run(model, optimizer, data, RunConfig(batch_size=96, shards=12)) as run:
        for step in run.steps(total=FOREVER):
            for x, y in step.batches():
                step.backward(F.cross_entropy(model(x), y))
            step.commit()


def newest_generation(cluster: TrainingCluster) -> int:
    return max((e["generation"] for e in cluster.events() if e["kind"] == "commit"), default=0)


def first_commit_after(cluster: TrainingCluster, generation: int, workers: int) -> float:
    """When a later generation with so many workers committed its first step."""

    def commits() -> list[float]:
        return [
            e["time"]
            for e in cluster.events()
            if e["kind"] == "commit" and e["generation"] > generation and e["workers"] == workers
        ]

    cluster.wait_until(lambda: bool(commits()), "a commit", 60)
    return min(commits())


def cold_start(cluster: TrainingCluster, name: str) -> subprocess.Popen:
    environment = os.environ | {
        "TENSORFORGE_COORDINATOR": cluster.address,
        "TENSORFORGE_WORKER_ID": name,
        "TENSORFORGE_RUN_DIR": str(cluster.folder),
        "TENSORFORGE_CONFIG": json.dumps(encode(CONFIG)),
    }
    return subprocess.Popen([sys.executable, __file__, "--worker", "ours"], env=environment)


def ours(repeats: int, folder: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"kill": [], "warm join": [], "freeze": [], "cold join": []}
    phases: list[dict[str, float]] = []
    with TrainingCluster(our_worker, (), folder, config=CONFIG, desired_workers=WORKERS) as cluster:
        for number in range(WORKERS):
            cluster.start_worker(f"w{number}")
        first_commit_after(cluster, 0, WORKERS)
        for number in range(WORKERS, WORKERS + repeats):
            victim = sorted(cluster.workers)[number % WORKERS]
            before = newest_generation(cluster)
            started = time.time()
            cluster.kill(victim)
            found["kill"].append(first_commit_after(cluster, before, WORKERS - 1) - started)
            phases += [e["phases"] for e in cluster.events() if e["kind"] == "formed"][
                -(WORKERS - 1) :
            ]
            before = newest_generation(cluster)
            started = time.time()
            cluster.start_worker(f"w{number}")
            joined = first_commit_after(cluster, before, WORKERS) - started
            found["warm join"].append(joined - STABILITY_MS / 1000)
        for _ in range(max(2, repeats // 3)):
            victim = min(cluster.workers)
            before = newest_generation(cluster)
            cluster.freeze(victim)
            first_commit_after(cluster, before, WORKERS - 1)
            time.sleep(1.0)  # the coordinator hears of the first commit with the next heartbeat
            with CoordinatorClient(cluster.address) as client:
                record = [r for r in client.status().rescales if r.removed][-1]
            noticed = sum(record.milliseconds.values()) - record.detection_ms
            found["freeze"].append(noticed / 1000)
            before = newest_generation(cluster)
            cluster.thaw(victim)
            first_commit_after(cluster, before, WORKERS)
        victim = min(cluster.workers)
        before = newest_generation(cluster)
        cluster.kill(victim)
        first_commit_after(cluster, before, WORKERS - 1)
        before, started = newest_generation(cluster), time.time()
        newcomer = cold_start(cluster, "cold")
        joined = first_commit_after(cluster, before, WORKERS) - started
        found["cold join"].append(joined - STABILITY_MS / 1000)
        newcomer.kill()
        newcomer.wait()
    names = phases[0].keys()
    medians = {n: statistics.median(p[n] for p in phases if n in p) for n in names}
    print(
        "our phases after a kill, median ms: "
        + ", ".join(f"{n} {v:.1f}" for n, v in medians.items())
    )
    return found


def peer_log() -> None:
    with Path(os.environ["BENCH_LOG"]).open("a") as file:
        file.write(f"{os.getpid()} {time.time()}\n")


def torchrun_worker() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model, data = model_and_data()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = data[:24]
    while True:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        peer_log()


def torchft_worker() -> None:
    from datetime import timedelta

    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    model, data = model_and_data()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        replica_id=f"replica-{os.environ['BENCH_REPLICA']}",
        timeout=timedelta(seconds=30),
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, plain)
    x, y = data[:24]
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        if manager.current_step() > before:  # a step that was not committed does not count
            peer_log()


class PeerLog:
    """What the workers of a peer have written: who stepped when. Reads only what came since."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.first: dict[int, float] = {}

    def refresh(self) -> list[float]:
        """When the steps that are new in the log were done."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        steps = [(int(pid), float(when)) for pid, when in map(bytes.split, whole.splitlines())]
        for pid, when in steps:
            self.first.setdefault(pid, when)
        return [when for _, when in steps]

    def members(self) -> set[int]:
        """Everybody who has ever done a step."""
        self.refresh()
        return set(self.first)

    def next_step_after(self, moment: float, patience: float) -> float:
        """When the first step after `moment` was done."""
        later: list[float] = []

        def arrived() -> bool:
            later.extend(when for when in self.refresh() if when > moment)
            return bool(later)

        wait_for(arrived, patience, "the next step")
        return min(later)


def wait_for(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.01)


def stop(process: subprocess.Popen) -> None:
    """End a process that we started, with its children."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def torchrun(repeats: int, folder: Path) -> list[float]:
    log = folder / "torchrun.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORKERS)]
    command += ["--max-restarts", "100", "--standalone"]
    command += [__file__, "--worker", "torchrun"]
    with (folder / "torchrun.log").open("w") as output:
        agent = subprocess.Popen(
            command,
            env=os.environ
            | {
                "BENCH_LOG": str(log),
                "OMP_NUM_THREADS": "1",
                # With the agent's store, restarted workers look for their predecessors and never connect.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
            stdout=output,
            stderr=output,
        )
        try:
            times, known = [], set()
            seen = PeerLog(log)
            fresh = lambda: seen.members() - known  # noqa: E731
            for _ in range(repeats):
                wait_for(lambda: len(fresh()) == WORKERS, 90, "training")
                members = fresh()
                started = time.time()
                os.kill(max(members), signal.SIGKILL)
                known |= members
                wait_for(lambda: bool(fresh()), 90, "the restart")
                times.append(min(seen.first[pid] for pid in fresh()) - started)
            return times
        finally:
            stop(agent)


def torchft(repeats: int, folder: Path, *, tuned: bool) -> list[float]:
    python = torchft_environment(folder)
    log, port = folder / f"torchft-{tuned}.jsonl", free_port()
    lighthouse = [
        str(python.parent / "torchft_lighthouse"),
        "--min_replicas",
        "1",
        "--bind",
        f"127.0.0.1:{port}",
    ]
    if tuned:
        lighthouse += [
            "--heartbeat_timeout_ms",
            "1000",
            "--quorum_tick_ms",
            "10",
            "--join_timeout_ms",
            "1000",
        ]
    with (folder / "torchft.log").open("a") as output:
        leader = subprocess.Popen(lighthouse, stdout=output, stderr=output)
        members = {}

        def start(number: int) -> None:
            environment = os.environ | {
                "BENCH_LOG": str(log),
                "BENCH_REPLICA": str(number),
                "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
                "OMP_NUM_THREADS": "1",
            }
            members[number] = subprocess.Popen(
                [str(python), __file__, "--worker", "torchft"],
                env=environment,
                stdout=output,
                stderr=output,
            )

        try:
            for number in range(WORKERS):
                start(number)
            times = []
            seen = PeerLog(log)
            for number in range(WORKERS, WORKERS + repeats):
                pids = {m.pid for m in members.values()}
                trained = lambda: pids <= seen.members()  # noqa: E731, B023
                wait_for(trained, 120, "training on all replicas")
                time.sleep(1.0)
                victim = min(members)
                started = time.time()
                stop(members.pop(victim))
                # A step that was complete before the death may still be written: skip 20 ms.
                times.append(seen.next_step_after(started + 0.02, 90) - started)
                start(number)
            return times
        finally:
            for process in [*members.values(), leader]:
                stop(process)


def torchft_environment(folder: Path) -> Path:
    """The python of an environment that sees our torch and has torchft besides."""
    home = folder / "torchft-venv"
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        paths = f"{sysconfig.get_path('purelib')}\n{Path(__file__).parents[1] / 'src'}\n"
        (home / "lib" / version / "site-packages" / "shared.pth").write_text(paths)
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, "torchft-nightly"], check=True, stderr=subprocess.DEVNULL)
    return python


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def show(name: str, times: list[float]) -> None:
    figures = f"p50 {percentile(times, 50):7.3f} s   p99 {percentile(times, 99):7.3f} s"
    print(f"{name:38} {figures}   ({len(times)} times)", flush=True)


def measure(name: str, function, *arguments, **options) -> list[float] | None:
    try:
        times = function(*arguments, **options)
    except Exception as error:  # noqa: BLE001  a peer that does not run here is told, not fatal
        print(f"{name:38} not measured: {type(error).__name__}: {error}", flush=True)
        return None
    show(name, times)
    return times


def compare(ours_: list[float], theirs: list[float] | None, name: str, aim: float) -> None:
    if theirs:
        ratio = percentile(ours_, 50) / percentile(theirs, 50)
        verdict = "met" if ratio <= aim else "missed"
        print(f"ours / {name}: 1/{1 / ratio:.0f} (aim: at most 1/{1 / aim:.0f}): {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", choices=["ours", "torchrun", "torchft"])
    arguments = parser.parse_args()
    workers = {"ours": our_worker, "torchrun": torchrun_worker, "torchft": torchft_worker}
    if arguments.worker:
        workers[arguments.worker]()
        return
    folder = Path(tempfile.mkdtemp(prefix="tensorforge-rescale-"))
    try:
        mine = ours(4 if arguments.quick else 20, folder / "ours")
        show("ours: kill -9 to the next commit", mine["kill"])
        show("ours: freeze, from the notice", mine["freeze"])
        show("ours: join of a warm process", mine["warm join"])
        show("ours: join of a cold process", mine["cold join"])
        few = 1 if arguments.quick else 4
        restart = measure("torchrun: kill -9 to the next step", torchrun, few, folder)
        default = measure("torchft, defaults", torchft, few, folder, tuned=False)
        tuned = measure("torchft, tuned", torchft, few, folder, tuned=True)
        compare(mine["kill"], restart, "torchrun", 1 / 30)
        compare(mine["kill"], tuned, "torchft tuned", 1 / 5)
        compare(mine["kill"], default, "torchft defaults", 1 / 5)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
