"""The data plane in one run: planning, moved shares, transfers and the order, each beside its peers.

`--quick` takes smaller numbers. Figures of one section are measured interleaved; ratios are medians
of pairs measured next to each other.
"""

import argparse
import contextlib
import hashlib
import multiprocessing
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from tensorforge.cluster.config import ElasticTrainingConfig, RedistributionType
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.worker import WorkerId
from tensorforge.data import (
    DataRedistributionPlan,
    DataRedistributor,
    DatasetInfo,
    DataTransferManager,
    SampleSchema,
    ShardServer,
    ShardStore,
    ShuffledOrder,
    partition,
)

MIB = 1 << 20
INCREMENTAL = DataRedistributor(
    ElasticTrainingConfig(redistribution_type=RedistributionType.INCREMENTAL)
)


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def verdict(met: bool) -> str:
    return "met" if met else "missed"


def topologies(before: int, after: int) -> tuple[ClusterTopology, ClusterTopology]:
    workers = tuple(WorkerId(f"w{n}", "host", n % 65536) for n in range(max(before, after)))
    old = ClusterTopology(workers=workers[:before])
    return old, old.succeed(workers[:after])


def planning(repeats: int) -> None:
    print("planning, 1000 -> 1024 workers")
    old, new = topologies(1000, 1024)
    times: dict[int, list[float]] = {10**6: [], 10**9: [], 10**12: []}
    for _ in range(repeats):
        for size, found in times.items():
            found.append(
                seconds(lambda size=size: INCREMENTAL.calculate_plan(old, new, size))  # type: ignore[misc]
            )
    for size, found in times.items():
        print(
            f"  {size:>16,} samples  median {statistics.median(found) * 1e3:6.1f} ms"
            f"  least {min(found) * 1e3:6.1f} ms"
        )
    median = statistics.median(times[10**9]) * 1e3
    print(f"  aim: under 20 ms for a billion: {median:.1f} ms, {verdict(median < 20)}")
    ratio = min(times[10**12]) / min(times[10**6])
    print(f"  aim: independent of n: {ratio:.2f} x from 10^6 to 10^12, {verdict(ratio < 1.5)}")
    plan = INCREMENTAL.calculate_plan(old, new, 10**9)
    check = statistics.median(
        seconds(lambda: INCREMENTAL.validate_redistribution(new, plan)) for _ in range(5)
    )
    print(f"  validation of that plan {check * 1e3:.1f} ms")


def ring(workers: int, points: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Consistent hashing: places on a circle, and whose they are."""
    places = [
        (int.from_bytes(hashlib.blake2b(f"{w} {p}".encode(), digest_size=8).digest()), w)
        for w in range(workers)
        for p in range(points)
    ]
    places.sort()
    owners = np.array([worker for _, worker in places])
    return np.array([place for place, _ in places], dtype=np.uint64), owners


def shares(size: int) -> None:
    print("moved share of the samples; the least possible first")
    samples = np.arange(size, dtype=np.int64)
    hashed = samples.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    hashed ^= hashed >> np.uint64(29)
    hashed *= np.uint64(0xD6E8FEB86659FD93)
    for before, after in ((8, 9), (1000, 1024), (1024, 1000)):
        plan = INCREMENTAL.calculate_plan(*topologies(before, after), size)

        def of_ring(workers: int) -> np.ndarray:
            places, owners = ring(workers)
            return owners[np.searchsorted(places, hashed) % len(places)]

        old, new = of_ring(before), of_ring(after)
        loads = np.bincount(new, minlength=after)
        print(
            f"  {before:>4} -> {after:<4}  minimum {plan.minimum_moves / size:6.2%}"
            f"  ours {plan.moved_samples / size:6.2%}"
            f"  consistent hashing {(old != new).mean():6.2%}"
            f" (fullest worker {loads.max() / loads.mean():.2f} x the mean; ours 1.00)"
            f"  contiguous {(samples * before // size != samples * after // size).mean():6.2%}"
            f"  strided {(samples % before != samples % after).mean():6.2%}"
        )
        assert plan.moved_samples == plan.minimum_moves


def order(count: int) -> None:
    print(f"order, {count:,} samples")
    ours, peer = [], []
    whole = ShuffledOrder(count, seed=1)
    local = ShuffledOrder(count, seed=1, block=4096)
    blocked = []
    for _ in range(3):
        ours.append(seconds(lambda: whole.take(0, count)))
        blocked.append(seconds(lambda: local.take(0, count)))
        peer.append(seconds(lambda: torch.randperm(count)))
    per_sample = [min(found) / count * 1e9 for found in (ours, blocked, peer)]
    print(
        f"  per sample: ours {per_sample[0]:.0f} ns, in blocks of 4096 {per_sample[1]:.0f} ns, "
        f"torch.randperm {per_sample[2]:.0f} ns (ours / randperm {per_sample[0] / per_sample[2]:.1f})"
    )
    huge = ShuffledOrder(10**12, seed=1)
    seek = [seconds(lambda n=n: huge.take(n * 10**9, n * 10**9 + 32)) for n in range(200)]  # type: ignore[misc]
    print(
        f"  a batch of 32 anywhere in 10^12: ours {statistics.median(seek) * 1e6:.0f} us and no "
        f"memory; randperm of {count:,} first takes {min(peer) * 1e3:.0f} ms and "
        f"{count * 8 / MIB:.0f} MiB, of 10^12 it would take 8 TB"
    )


def serve(folder: str, pipe) -> None:
    """The sending side of all three ways, in a process of its own."""
    store = ShardStore(folder)
    files = sorted((Path(folder) / "segments").iterdir())
    listener = socket.create_server(("127.0.0.1", 0))
    total = sum(file.stat().st_size for file in files)
    with ShardServer(store, generation=1) as server, listener:
        pipe.send((server.address, listener.getsockname()))
        block = bytes(MIB)
        while True:
            connection, _ = listener.accept()
            with connection:
                wish = connection.recv(1)
                if wish == b"m":
                    for _ in range(total // MIB):
                        connection.sendall(block)
                elif wish == b"f":
                    for path in files:
                        with path.open("rb", buffering=0) as file:
                            while data := file.read(MIB):
                                connection.sendall(data)
                else:
                    return


class Transfers:
    """One sender process and three ways to receive what it has."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder = folder
        shards = 8
        rows = megabytes * MIB // 65536
        self.info = DatasetInfo(size=rows, schema=SampleSchema(dtype="|u1", shape=(65536,)))
        generator = np.random.default_rng(0)
        with ShardStore(folder / "source", self.info) as store:
            for shard in partition(rows, shards):
                data = generator.integers(0, 256, (shard.size, 65536), dtype=np.uint8)
                store.put(shard.start_index, shard.end_index, data)
        here, there = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=serve, args=(str(folder / "source"), there))
        self.process.start()
        address, self.plain = here.recv()
        self.me, source = WorkerId("me", "127.0.0.1", 1), WorkerId("source", *address)
        old = ClusterTopology(workers=(source,))
        self.plan: DataRedistributionPlan = INCREMENTAL.calculate_shard_plan(
            old, old.succeed((self.me,)), partition(rows, shards), departing=(source,)
        )

    def close(self) -> None:
        with socket.create_connection(self.plain) as sock:
            sock.sendall(b"q")
        self.process.join()

    def _receive(self, wish: bytes) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(MIB))
        with socket.create_connection(self.plain) as sock:
            sock.sendall(wish)
            while count := sock.recv_into(buffer):
                yield buffer[:count]

    def memory_to_memory(self) -> int:
        return sum(len(data) for data in self._receive(b"m"))

    def file_to_file(self) -> int:
        total = 0
        with (self.folder / "plain").open("wb", buffering=0) as file:
            for data in self._receive(b"f"):
                total += file.write(data)
        return total

    def ours(self) -> int:
        with (
            ShardStore(self.folder / "arrived", self.info) as store,
            DataTransferManager(worker=self.me, store=store, generation=1) as manager,
        ):
            return manager.execute(self.plan).bytes_received

    def rate(self, way: Callable[[], int]) -> float:
        for leftover in ("plain", "arrived"):
            path = self.folder / leftover
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        started = time.perf_counter()
        total = way()
        return total / (time.perf_counter() - started) / 1e6


def transfers(megabytes: int, rounds: int, folder: str | None) -> None:
    print(f"loopback, {megabytes} MiB in 8 shards, sender and receiver two processes")
    with (
        tempfile.TemporaryDirectory(dir=folder) as place,
        contextlib.closing(Transfers(Path(place), megabytes)) as bench,
    ):
        ways = {
            "plain socket, memory to memory (the limit)": bench.memory_to_memory,
            "plain socket, file to file (the peer)": bench.file_to_file,
            "ours, file to file, CRC-32C, 4 at once": bench.ours,
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                rates[name].append(bench.rate(way))
        for name, found in rates.items():
            print(
                f"  {name:45} median {statistics.median(found):6.0f} MB/s  best {max(found):6.0f}"
            )
        limit, peer, ours = rates.values()
        to_limit = statistics.median(o / p for o, p in zip(ours, limit, strict=True))
        to_peer = statistics.median(o / p for o, p in zip(ours, peer, strict=True))
        print(f"  ours / peer {to_peer:.2f}, aim: at least 0.50, {verdict(to_peer >= 0.5)}")
        print(f"  ours / limit {to_limit:.2f} (the limit writes no file)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", help="where transferred files go")
    options = parser.parse_args()
    planning(5 if options.quick else 21)
    shares(200_000 if options.quick else 4_096_000)
    transfers(64 if options.quick else 256, 3 if options.quick else 9, options.folder)
    order(1_000_000 if options.quick else 10_000_000)


if __name__ == "__main__":
    main()
