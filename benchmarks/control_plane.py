"""The control plane under load: heartbeats of many workers, a rescale of all of them, detection of a kill.

The coordinator runs in a process of its own on one core. Simulated workers speak the real protocol over real
connections, one each, from a second process. Limits and peers are measured in the same run: an echo of the same
bytes over the same gRPC without any coordinator behind it, a bare TCP connection that breaks, and torchrun.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import grpc
import psutil

from tensorforge.cluster.workers import WorkerId
from tensorforge.elastic import CoordinatorClient, ElasticTrainingConfig
from tensorforge.elastic.protocol import messages
from tensorforge.elastic.protocol.commands import SERVICE
from tensorforge.elastic.protocol.rescale_record import RescaleRecord
from tensorforge.statistics import percentile
from tensorforge.testing.process_cluster import ProcessCluster

CONFIG = ElasticTrainingConfig(
    stability_window_ms=600_000,
    worker_heartbeat_timeout_ms=30_000,
    rescale_timeout_ms=120_000,
    failure_tolerance_percentage=100,
    max_consecutive_failures=1000,
)


class Simulated:
    """One worker that answers at once."""

    def __init__(self, name: str, address: str) -> None:
        self.worker = WorkerId(name, "127.0.0.1", 0)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        self.channel = grpc.aio.insecure_channel(address, options)
        self.call = self.channel.stream_stream(f"/{SERVICE}/Join")()
        self.incarnation = name
        self.generation = 0
        self.formed_at: dict[int, float] = {}
        self.told_at: dict[int, float] = {}
        self.sent: dict[int, float] = {}
        self.round_trips: list[float] = []
        self.sequence = 0
        self.turn = asyncio.Lock()

    async def say(self, kind: type, **fields: object) -> None:
        fields.setdefault("generation", self.generation)
        message = messages.to_bytes(kind(incarnation=self.incarnation, **fields))
        async with self.turn:
            await self.call.write(message)

    async def run(self) -> None:
        hello = messages.Hello(
            protocol=messages.PROTOCOL, worker=self.worker, incarnation=self.incarnation
        )
        await self.call.write(messages.to_bytes(hello))
        while (data := await self.call.read()) is not grpc.aio.EOF:
            await self.take(messages.from_coordinator(data))

    async def take(self, message: messages.FromCoordinator) -> None:
        now = time.perf_counter()
        if isinstance(message, messages.Pong):
            self.round_trips.append(now - self.sent.pop(message.sequence))
        elif isinstance(message, messages.Rescale):
            self.generation = message.generation
            self.told_at[message.generation] = now
            await self.say(messages.Ready, committed_step=-1)
        elif isinstance(message, messages.FormationNotice):
            self.formed_at[message.generation] = now
            await self.say(messages.Formed)

    async def beat(self) -> None:
        self.sequence += 1
        self.sent[self.sequence] = time.perf_counter()
        await self.say(messages.Heartbeat, sequence=self.sequence)

    async def beat_every(self, seconds: float, phase: float) -> None:
        await asyncio.sleep(phase)
        while True:
            started = time.perf_counter()
            await self.beat()
            await asyncio.sleep(max(0.0, seconds - (time.perf_counter() - started)))


async def load(address: str, count: int, seconds: float, pid: int) -> dict[str, float]:
    """Connect, form, beat at 1 Hz, lose one worker; all figures of one size."""
    workers = [Simulated(f"s{index:04}", address) for index in range(count)]
    started = time.perf_counter()
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    await _until(lambda: all(1 in worker.formed_at for worker in workers))
    joined = time.perf_counter() - started
    beats = [
        asyncio.create_task(worker.beat_every(1.0, index / count))
        for index, worker in enumerate(workers)
    ]
    await asyncio.sleep(1.5)
    for worker in workers:
        worker.round_trips.clear()
    process = psutil.Process(pid)
    cpu, clock = sum(process.cpu_times()[:2]), time.perf_counter()
    await asyncio.sleep(seconds)
    cpu = sum(process.cpu_times()[:2]) - cpu
    clock = time.perf_counter() - clock
    trips = [trip * 1000 for worker in workers for trip in worker.round_trips]
    victim, survivors = workers[-1], workers[:-1]
    beats[-1].cancel()
    lost_at = time.perf_counter()
    tasks[-1].cancel()
    victim.call.cancel()
    await _until(lambda: all(2 in worker.formed_at for worker in survivors))
    told = max(worker.told_at[2] for worker in survivors) - lost_at
    formed = max(worker.formed_at[2] for worker in survivors) - lost_at
    record = await asyncio.to_thread(_last_rescale, address)
    for task in (*beats, *tasks):
        task.cancel()
    await asyncio.gather(*beats, *tasks, return_exceptions=True)
    for worker in workers:
        await worker.channel.close()
    return {
        "workers": count,
        "join_s": joined,
        "cpu_share": cpu / clock,
        "cpu_us_per_beat": cpu / len(trips) * 1e6,
        "beats": len(trips),
        "p50_ms": percentile(trips, 50),
        "p99_ms": percentile(trips, 99),
        "told_s": told,
        "acknowledged_s": (record.decision_ms + record.barrier_ms) / 1000,
        "formed_s": formed,
    }


def start_echo_server() -> subprocess.Popen[bytes]:
    source = textwrap.dedent(
        """
        import asyncio, grpc
        async def join(requests, context):
            while (data := await context.read()) is not grpc.aio.EOF:
                await context.write(data)
        async def main():
            server = grpc.aio.server()
            method = grpc.stream_stream_rpc_method_handler(join)
            handler = grpc.method_handlers_generic_handler("echo.Echo", {"Join": method})
            server.add_generic_rpc_handlers((handler,))
            print(server.add_insecure_port("127.0.0.1:0"), flush=True)
            await server.start()
            await server.wait_for_termination()
        asyncio.run(main())
        """
    )
    return subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)


async def echo(server: subprocess.Popen[bytes], count: int, seconds: float) -> dict[str, float]:
    """The limit: the same messages to a gRPC echo server with nothing behind it."""
    try:
        _pin(server.pid, 0)
        port = int(server.stdout.readline())
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(count)]
        calls = [channel.stream_stream("/echo.Echo/Join")() for channel in channels]
        beat = messages.Heartbeat(incarnation="s0000", generation=1, sequence=1)
        data = messages.to_bytes(beat)
        trips: list[float] = []
        connected = asyncio.Barrier(count + 1)

        async def exchange(call, phase: float) -> None:
            await call.write(data)
            await call.read()
            await connected.wait()
            await asyncio.sleep(phase)
            while True:
                started = time.perf_counter()
                await call.write(data)
                await call.read()
                took = time.perf_counter() - started
                trips.append(took * 1000)
                await asyncio.sleep(max(0.0, 1.0 - took))

        tasks = [
            asyncio.create_task(exchange(call, index / count)) for index, call in enumerate(calls)
        ]
        await connected.wait()
        await asyncio.sleep(1.5)
        process = psutil.Process(server.pid)
        cpu = sum(process.cpu_times()[:2])
        trips.clear()
        await asyncio.sleep(seconds)
        cpu = sum(process.cpu_times()[:2]) - cpu
        measured = list(trips)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in channels:
            await channel.close()
        return {
            "cpu_us_per_beat": cpu / len(measured) * 1e6,
            "p50_ms": percentile(measured, 50),
            "p99_ms": percentile(measured, 99),
        }
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


async def _until(condition, seconds: float = 120.0) -> None:
    deadline = time.perf_counter() + seconds
    while not condition():
        if time.perf_counter() > deadline:
            raise TimeoutError
        await asyncio.sleep(0.002)


def _last_rescale(address: str) -> RescaleRecord:
    with CoordinatorClient(address) as client:
        return client.status().rescales[-1]


def _pin(pid: int, core: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    psutil.Process(pid).cpu_affinity([cores[core % len(cores)]])


def measure_load(sizes: list[int], seconds: float) -> list[dict[str, float]]:
    results = []
    for size in sizes:
        with (
            tempfile.TemporaryDirectory() as folder,
            ProcessCluster(Path(folder), CONFIG, desired_workers=size) as local,
        ):
            address = local.start_coordinator()
            _pin(local.coordinator.pid, 0)
            results.append(asyncio.run(load(address, size, seconds, local.coordinator.pid)))
    return results


def measure_kills(rounds: int) -> list[float]:
    """Milliseconds from kill -9 of a worker process until a survivor was told."""
    config = ElasticTrainingConfig(
        stability_window_ms=100,
        failure_tolerance_percentage=100,
        max_consecutive_failures=100,
    )
    delays = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessCluster(Path(folder), config, desired_workers=3) as local,
    ):
        local.start_coordinator()
        names = ["keep0", "keep1", "victim0"]
        for name in names:
            local.start_worker(name)
        for index in range(rounds):
            victim = f"victim{index}"
            generation = local.wait_until_active({"keep0", "keep1", victim}).generation
            killed_at = time.time()
            local.workers[victim].signal(signal.SIGKILL)
            local.wait_until_active({"keep0", "keep1"})
            told = [
                event["time"]
                for event in local.workers["keep0"].events()
                if event["what"] == "told" and event["generation"] == generation + 1
            ]
            delays.append((told[0] - killed_at) * 1000)
            local.start_worker(f"victim{index + 1}")
    return delays


def measure_bare_socket(rounds: int) -> list[float]:
    """The limit: milliseconds until a TCP connection of a killed process reads as closed."""
    source = "import socket,sys,time;s=socket.create_connection(('127.0.0.1',int(sys.argv[1])));time.sleep(99)"
    delays = []
    for _ in range(rounds):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            process = subprocess.Popen([sys.executable, "-S", "-c", source, str(port)])
            connection, _ = listener.accept()
            with connection:
                killed_at = time.perf_counter()
                process.kill()
                connection.recv(1)
                delays.append((time.perf_counter() - killed_at) * 1000)
            process.wait()
    return delays


def measure_torchrun() -> float | None:
    """The peer: milliseconds from kill -9 of a worker until torchrun has started the workers again."""
    script = "import os,sys,time;open(sys.argv[1],'a').write(f'{os.getpid()} {time.time()}\\n');time.sleep(600)"
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder, "w.py"), Path(folder, "log")
        path.write_text(script)
        log.touch()
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3"]
        command += ["--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        agent = subprocess.Popen(
            [*command, str(path), str(log)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        try:
            first = _lines(log, 3)
            killed_at = time.time()
            os.kill(int(first[0].split()[0]), signal.SIGKILL)
            return (float(_lines(log, 6)[-1].split()[1]) - killed_at) * 1000
        except TimeoutError:
            return None
        finally:
            agent.terminate()
            agent.wait()


def _lines(path: Path, count: int) -> list[str]:
    deadline = time.monotonic() + 90
    while len(lines := path.read_text().splitlines()) < count:
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)
    return lines


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Each figure's median over the repeats."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def verdict(met: bool) -> str:
    return "met" if met else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, no torchrun")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = [50, 100] if options.quick else [100, 300, 1000]
    seconds, repeats = (3.0, 1) if options.quick else (6.0, 3)
    _pin(os.getpid(), 1)
    gc.disable()  # the pauses of a thousand workers in one process are not the coordinator's
    results, echoes = measure_load(sizes[:-1], seconds), []
    largest: list[dict[str, float]] = []
    for _ in range(repeats):
        largest += measure_load(sizes[-1:], seconds)
        echoes.append(asyncio.run(echo(start_echo_server(), sizes[-1], seconds)))
    results.append(medians(largest))
    limit = medians(echoes)
    gc.enable()
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    rounds = 3 if options.quick else 15
    kills, bare = measure_kills(rounds), measure_bare_socket(rounds)
    torchrun = None if options.quick else measure_torchrun()
    if options.json:
        print(json.dumps({"load": results, "echo": limit, "kills_ms": kills, "bare_ms": bare}))
        return
    print("workers  CPU share  CPU µs/beat  p50 ms  p99 ms  told s  answered s  formed s  joined s")
    for row in results:
        print(
            f"{row['workers']:7.0f}  {row['cpu_share']:9.1%}  {row['cpu_us_per_beat']:11.0f}  "
            f"{row['p50_ms']:6.2f}  {row['p99_ms']:6.2f}  {row['told_s']:6.3f}  "
            f"{row['acknowledged_s']:10.3f}  {row['formed_s']:8.3f}  {row['join_s']:8.2f}"
        )
    small, large = results[0], results[-1]
    growth = large["cpu_us_per_beat"] / small["cpu_us_per_beat"]
    spread = ", ".join(f"{row['p99_ms']:.2f}" for row in largest)
    print(
        f"{large['workers']:.0f} workers: medians of {repeats} runs, in turns with the echo; p99 {spread} ms"
    )
    print(
        f"limit: a gRPC echo of the same bytes to {large['workers']:.0f} peers costs "
        f"{limit['cpu_us_per_beat']:.0f} µs a beat, p50 {limit['p50_ms']:.2f} ms, "
        f"p99 {limit['p99_ms']:.2f} ms; "
        f"the coordinator {large['cpu_us_per_beat'] / limit['cpu_us_per_beat']:.2f}, "
        f"{large['p50_ms'] / limit['p50_ms']:.2f} and {large['p99_ms'] / limit['p99_ms']:.2f} times that"
    )
    acknowledged = large["acknowledged_s"]
    print(
        f"a rescale of {large['workers']:.0f} told and acknowledged in {acknowledged:.3f} s;"
        f" aim < 1 s: {verdict(acknowledged < 1)}"
    )
    print(
        f"cost per worker, {small['workers']:.0f} → {large['workers']:.0f} workers: {growth:.2f} times;"
        f" aim flat (within 1.3): {verdict(growth < 1.3)}"
    )
    ours, floor = statistics.median(kills), statistics.median(bare)
    print(
        f"kill -9 → survivors told: median {ours:.1f} ms (worst {max(kills):.1f} of {len(kills)});"
        f" aim < 100 ms: {verdict(ours < 100)}"
    )
    print(
        f"limit: a bare socket notices after {floor:.2f} ms; ours is {ours / floor:.1f} times that"
    )
    if torchrun is not None:
        print(
            f"peer: torchrun has its workers started again after {torchrun:.0f} ms;"
            f" {torchrun / ours:.0f} times ours (it restarts all of them, we none)"
        )


if __name__ == "__main__":
    main()
