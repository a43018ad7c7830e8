"""The data plane in one run: planning, moved shares, transfers and the order, each beside its peers.

`--quick` takes smaller numbers. Figures of one section are measured interleaved; ratios are medians
of pairs measured next to each other.
"""

import argparse
import contextlib
import hashlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tensorforge.cluster.elastic_config import ElasticTrainingConfig, RedistributionType
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WorkerId
from tensorforge.data import DataRedistributor, ShuffledOrder
from workloads.loopback import MIB, SHARDS, STREAMS, Loopback, has_iperf3, iperf3

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
    rescales(20 if repeats < 10 else 100)


def rescales(changes: int) -> None:
    """Plan after plan within one epoch, each from what the last one left."""
    chance = random.Random(1)
    workers = [WorkerId(f"w{n}", "host", 1) for n in range(200_000)]
    topology, joined = ClusterTopology(workers=tuple(workers[:1000])), 1000
    ownership, taken = None, []
    for _ in range(changes):
        wanted = chance.randint(950, 1050)
        members = list(topology.workers)
        chance.shuffle(members)
        members = members[chance.randint(0, 20) :][:wanted]
        members += workers[joined : joined + wanted - len(members)]
        joined += wanted
        new = topology.succeed(tuple(members))
        started = time.perf_counter()
        plan = INCREMENTAL.calculate_plan(topology, new, 10**9, ownership=ownership)
        taken.append(time.perf_counter() - started)
        assert plan.moved_samples == plan.minimum_moves
        topology, ownership = new, plan.ownership
    print(
        f"  after {changes} random changes of about 1000 workers: {plan.total_shards} ranges, "
        f"{len(plan.transfers)} transfers; the last plans took {statistics.median(taken[-5:]) * 1e3:.0f} ms, "
        f"each moved the minimum"
    )


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


def transfers(megabytes: int, rounds: int, folder: str | None) -> None:
    print(f"loopback, {megabytes} MiB in {SHARDS} shards, sender and receiver two processes")
    with (
        tempfile.TemporaryDirectory(dir=folder) as place,
        contextlib.closing(Loopback(Path(place), megabytes)) as bench,
    ):
        ways: dict[str, Callable[[], float]] = {
            "plain socket, file to file (the peer)": lambda: bench.rate(bench.file_to_file),
            "plain socket, memory to memory": lambda: bench.rate(bench.memory_to_memory),
            f"ours, file to file, CRC-32C, {STREAMS} at once": lambda: bench.rate(bench.ours),
            "ours, one at a time": lambda: bench.rate(lambda: bench.ours(1)),
        }
        if has_iperf3():
            ways["iperf3, one stream"] = lambda: iperf3(4 * megabytes, 1)
            ways[f"iperf3, {STREAMS} streams"] = lambda: iperf3(4 * megabytes, STREAMS)
        else:
            print("  SKIPPED: iperf3 is not installed (Debian's package iperf3)")
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                rates[name].append(way())
    for name, found in rates.items():
        print(f"  {name:45} median {statistics.median(found):6.0f} MB/s  best {max(found):6.0f}")
    peer, memory, ours, single, *iperf = rates.values()
    to_peer = ratio(ours, peer)
    print(
        f"  ours / plain file to file {to_peer:.2f}, one at a time {ratio(single, peer):.2f}; "
        f"aim: at least 0.50, {verdict(to_peer >= 0.5)}"
    )
    print(f"  ours / memory to memory {ratio(ours, memory):.2f} (which reads and writes no file)")
    if iperf:
        to_one, to_many = ratio(ours, iperf[0]), ratio(ours, iperf[1])
        print(
            f"  ours / iperf3, which moves memory only, {to_one:.2f}; with {STREAMS} streams {to_many:.2f}; "
            f"one at a time / one stream {ratio(single, iperf[0]):.2f}; "
            f"aim: at least 0.50 of iperf3, {verdict(to_one >= 0.5)}"
        )


def ratio(ours: list[float], peer: list[float]) -> float:
    """The median of the ratios of measurements next to each other."""
    return statistics.median(o / p for o, p in zip(ours, peer, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller numbers, less to trust")
    parser.add_argument("--only", choices=("planning", "shares", "transfers", "order"))
    parser.add_argument("--folder", help="where transferred files go")
    options = parser.parse_args()
    quick = options.quick
    sections: dict[str, Callable[[], None]] = {
        "planning": lambda: planning(5 if quick else 21),
        "shares": lambda: shares(200_000 if quick else 4_096_000),
        "transfers": lambda: transfers(64 if quick else 256, 3 if quick else 9, options.folder),
        "order": lambda: order(1_000_000 if quick else 10_000_000),
    }
    for name, measure in sections.items():
        if options.only in (None, name):
            measure()


if __name__ == "__main__":
    main()
