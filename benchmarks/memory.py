"""What the memory pool costs and how tightly it packs, beside a list scan, torch and PyTorch's rules.

    python benchmarks/memory.py [--quick] [--record FOLDER]

Costs are CPU time of the measuring thread, the least of several repeats, so that other work on the machine
counts little. `--record` records the bundled traces anew (needs transformers, takes minutes) and stops.
"""

import argparse
import gc
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tensorforge.memory import (
    AllocationRequest,
    GpuDevice,
    MemoryPool,
    replay_bounded,
    replay_trace,
)
from tensorforge.memory.pool.free_space import FreeSpace
from tensorforge.memory.pool.placement_policies import GRANULARITY, POLICY_NAMES
from tensorforge.memory.traces.bundled_traces import bundled_trace, bundled_traces

SPACE = 1 << 50
aims: list[tuple[str, bool]] = []


def aim(text: str, met: bool) -> None:
    aims.append((text, met))
    print(f"  aim: {text}: {'met' if met else 'MISSED'}")


def rounded(size: int) -> int:
    return -(-size // GRANULARITY) * GRANULARITY


def trace_sizes(count: int) -> list[int]:
    """Sizes as models ask for them: drawn from the recorded traces."""
    known = [
        rounded(life.size) for name in bundled_traces() for life in bundled_trace(name).lifetimes()
    ]
    return random.Random(1).choices(known, k=count)


def distinct_sizes(count: int) -> list[int]:
    """The hard case: hardly two sizes alike, so hardly a hole fits exactly."""
    rng = random.Random(1)
    return [rng.randint(1, 1 << 20) for _ in range(count)]


def fragmented(live: int, sizes: Sequence[int]) -> tuple[FreeSpace, list[tuple[int, int]]]:
    """A space with `live` blocks, every second of which has been replaced at random."""
    space = FreeSpace(SPACE)
    blocks = [(space.take(size) or 0, size) for size in sizes[:live]]
    rng = random.Random(2)
    for size in sizes[: live // 2]:
        index = rng.randrange(live)
        space.give(*blocks[index])
        blocks[index] = (space.take(size) or 0, size)
    return space, blocks


def core_pairs(
    space: FreeSpace, blocks: list[tuple[int, int]], sizes: Sequence[int], repeats: int
) -> float:
    """Microseconds per free + allocate of random blocks in the indexed core."""
    best = float("inf")
    for repeat in range(repeats):
        rng = random.Random(repeat)
        victims = [rng.randrange(len(blocks)) for _ in sizes]
        started = time.thread_time()
        for index, size in zip(victims, sizes, strict=True):
            space.give(*blocks[index])
            blocks[index] = (space.take(size) or 0, size)
        best = min(best, time.thread_time() - started)
    return best / len(sizes) * 1e6


class ListScan:
    """The free list as a plain list of holes, scanned for every request and every release."""

    def __init__(self, space: FreeSpace) -> None:
        self.holes = space.holes()

    def take(self, size: int) -> int:
        hole, offset = min((hole, offset) for offset, hole in self.holes if hole >= size)
        self.holes.remove((offset, hole))
        if hole > size:
            self.holes.append((offset + size, hole - size))
        return offset

    def give(self, offset: int, size: int) -> None:
        beside = [h for h in self.holes if h[0] == offset + size or h[0] + h[1] == offset]
        for hole in beside:
            self.holes.remove(hole)
        start = min([offset, *(hole[0] for hole in beside)])
        self.holes.append((start, size + sum(hole[1] for hole in beside)))


def list_scan_pairs(space: FreeSpace, blocks: list[tuple[int, int]], sizes: Sequence[int]) -> float:
    naive = ListScan(space)
    rng = random.Random(3)
    victims = rng.sample(range(len(blocks)), len(sizes))
    started = time.thread_time()
    for index, size in zip(victims, sizes, strict=True):
        naive.give(*blocks[index])
        naive.take(size)
    return (time.thread_time() - started) / len(sizes) * 1e6


def pool_pairs(live: int, sizes: Sequence[int], pairs: int) -> float:
    """The whole `MemoryPool`: lock, records, statistics."""
    pool = MemoryPool(GpuDevice("bench", SPACE))
    requests = [AllocationRequest("t", size, GRANULARITY) for size in sizes]
    keys = [pool.allocate(request, 0.0).block_id or "" for request in requests[:live]]
    rng = random.Random(2)
    victims = [rng.randrange(live) for _ in range(pairs)]
    started = time.thread_time()
    for index, request in zip(victims, requests[-pairs:], strict=True):
        pool.free(keys[index])
        keys[index] = pool.allocate(request, 0.0).block_id or ""
    return (time.thread_time() - started) / pairs * 1e6


def bench_cost(quick: bool) -> None:
    print("\nmicroseconds per allocate + free pair, at so many live blocks")
    counts = (1_000, 100_000) if quick else (1_000, 100_000, 1_000_000)
    pairs, repeats = (20_000, 2) if quick else (100_000, 3)
    by_count: dict[int, float] = {}
    for name, draw in (
        ("sizes of the traces", trace_sizes),
        ("all sizes different", distinct_sizes),
    ):
        print(
            f"  {name:22} {'indexed core':>13} {'MemoryPool':>11} {'list scan':>11} {'scan/core':>10}"
        )
        for live in counts:
            sizes = draw(live + pairs)
            space, blocks = fragmented(live, sizes)
            core = core_pairs(space, blocks, sizes[live:], repeats)
            scan = list_scan_pairs(space, blocks, sizes[live : live + max(3, 200_000 // live)])
            if draw is trace_sizes:
                by_count[live] = core
            del space, blocks
            pool = pool_pairs(live, sizes, pairs // 5)
            gc.collect()
            print(f"  {live:>22,} {core:13.2f} {pool:11.2f} {scan:11.1f} {scan / core:10.0f}")
    aim(f"core at 100,000 blocks under 6 us (is {by_count[100_000]:.2f})", by_count[100_000] < 6)
    if not quick:
        ratio = by_count[1_000_000] / by_count[1_000]
        aim(f"core at 1,000,000 at most 3 times its cost at 1,000 (is {ratio:.2f})", ratio <= 3)


def per_call(action: Callable[[], object], calls: int, repeats: int = 5) -> float:
    best = float("inf")
    for _ in range(repeats):
        started = time.thread_time()
        for _ in range(calls):
            action()
        best = min(best, time.thread_time() - started)
    return best / calls * 1e6


def bench_arena(quick: bool) -> None:
    import torch

    from tensorforge.memory import TensorArena

    nbytes = (64 if quick else 512) << 20
    print("\nreal memory")
    with TensorArena(nbytes) as arena:
        lend = per_call(lambda: arena.lend((64, 64)), 5_000)
        empty = per_call(lambda: torch.empty((64, 64)), 5_000)
        print(f"  lend a tensor and drop it {lend:8.2f} us; torch.empty {empty:.2f} us (CPU)")
        source = torch.ones(nbytes, dtype=torch.uint8)
        block = arena.allocate(nbytes)
        block.tensor().copy_(source)
        reused, fresh = [], []
        for _ in range(5):
            started = time.perf_counter()
            block.tensor().copy_(source)
            reused.append(nbytes / (time.perf_counter() - started) / 1e9)
            started = time.perf_counter()
            torch.empty(nbytes, dtype=torch.uint8).copy_(source)
            fresh.append(nbytes / (time.perf_counter() - started) / 1e9)
        ours, theirs = statistics.median(reused), statistics.median(fresh)
        print(
            f"  copy of {nbytes >> 20} MiB: into a reused arena block {ours:.1f} GB/s, "
            f"into a fresh allocation {theirs:.1f} GB/s: {ours / theirs:.1f} times"
        )
        block.free()


def bench_packing() -> None:
    print("\nbytes needed over bytes in use, each at its peak (1.000 is the lower bound)")
    overheads: dict[str, list[float]] = {policy: [] for policy in POLICY_NAMES}
    print(f"  {'':10}" + "".join(f"{policy:>14}" for policy in POLICY_NAMES))
    for name in bundled_traces():
        trace = bundled_trace(name)
        for policy in POLICY_NAMES:
            overheads[policy].append(replay_trace(trace, policy).overhead)
        print(f"  {name:10}" + "".join(f"{overheads[policy][-1]:14.3f}" for policy in POLICY_NAMES))
    means = {policy: statistics.mean(values) for policy, values in overheads.items()}
    print(f"  {'mean':10}" + "".join(f"{means[policy]:14.3f}" for policy in POLICY_NAMES))
    aim(
        f"default policy (best-fit) mean at most 1.05 (is {means['best-fit']:.3f})",
        means["best-fit"] <= 1.05,
    )
    aim(f"offline plan mean at most 1.01 (is {means['offline']:.3f})", means["offline"] <= 1.01)
    print("  with compaction, in a pool exactly as large as what is in use (in whole 512 bytes):")
    for name in bundled_traces():
        trace = bundled_trace(name)
        live = peak = 0
        for event in trace.events:
            live += rounded(event.size) if event.size > 0 else -rounded(-event.size)
            peak = max(peak, live)
        result = replay_bounded(trace, peak, compact=True)
        share = result.moved_bytes / max(1, result.allocated_bytes)
        outcome = "fits" if result.fits else "DOES NOT FIT"
        print(
            f"  {name:10} {outcome}, {result.compactions} compactions moved {share:.1%} of all bytes"
        )


def churn(pool: MemoryPool, seed: int, operations: int) -> None:
    rng = random.Random(seed)
    mine: list[str] = []
    for step in range(operations):
        if rng.random() < 0.5 or not mine:
            request = AllocationRequest(f"t{seed}", rng.randint(1, 2000), 1 << rng.randint(0, 6))
            block_id = pool.allocate(request, step).block_id
            if block_id is not None:
                mine.append(block_id)
        else:
            pool.free(mine.pop(rng.randrange(len(mine))))
    for block_id in mine:
        pool.free(block_id)


def bench_threads(quick: bool) -> None:
    operations = 5_000 if quick else 100_000
    pool = MemoryPool(GpuDevice("bench", 1 << 20))
    threads = [threading.Thread(target=churn, args=(pool, seed, operations)) for seed in range(8)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    whole = [(block.offset, block.size) for block in pool.blocks()] == [(0, 1 << 20)]
    print(
        f"\n8 threads, {operations:,} operations each: {seconds:.1f} s, {8 * operations / seconds:,.0f}/s"
    )
    aim("nothing is lost: one free block at the end", whole and pool.stats().allocated_bytes == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer blocks and repeats")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="record the traces anew")
    options = parser.parse_args()
    if options.record is not None:
        from workloads.memory_traces import record_all

        record_all(options.record)
        return
    bench_packing()
    bench_cost(options.quick)
    bench_arena(options.quick)
    bench_threads(options.quick)
    print(f"\n{sum(met for _, met in aims)} of {len(aims)} aims met")


if __name__ == "__main__":
    main()
