"""Durable save, load, background save and resharding: ours, torch.save, safetensors, DCP and the limits.

    python benchmarks/checkpoint.py [--quick] [--gigabytes 1] [--repeats 5] [--only save load] [--folder DIR]

Everything is measured in one run, in shuffled order, and compared by medians. Where ours is compared "in
turns", the two alternate, and each of ours is compared with the other's before and after it: a shared disk
drifts. "full" means that the page cache is large before a save, which is the best case of those who write
through it. Loads are "warm" (the file lies in the page cache) or "cold" (it does not).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
warnings.filterwarnings("ignore")

from safetensors.torch import load_file, save_file  # noqa: E402

from tensorforge.checkpoint import (  # noqa: E402
    DistributedCheckpoint,
    LoadOptions,
    SaveOptions,
    SingleProcess,
)
from tensorforge.storage.local_store import LocalStore  # noqa: E402

MEGABYTE = 1 << 20
WRITE_LIMITS = [(1, 4), (2, 1), (2, 4), (2, 8), (3, 2), (4, 1), (4, 2)]
"""Threads and megabytes per write, of which the best is the limit."""
READ_LIMITS = [(2, 1), (2, 4), (4, 1), (4, 4), (8, 1)]


class State:
    """Some dozens of tensors, as a large model has them."""

    def __init__(self, nbytes: int, *, fill: bool) -> None:
        count = 48
        rows = nbytes // 4 // 1024 // count
        self.tensors = {}
        for index in range(count):
            tensor = torch.empty(rows, 1024)
            tensor.fill_(index) if not fill else tensor.uniform_(-1, 1)
            self.tensors[f"layers.{index}.weight"] = tensor
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            if tensor is not self.tensors[name]:
                self.tensors[name].copy_(tensor)


class Module(torch.nn.Module):
    """The same as a module, so that loading happens in place."""

    def __init__(self, state: State) -> None:
        super().__init__()
        for name, tensor in state.tensors.items():
            self.register_buffer(name.replace(".", "_"), tensor)


def sync(path: Path) -> None:
    for target in (path, path.parent):
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)


def fill_page_cache(folder: Path) -> None:
    """Grow the page cache over most of the free memory, so that later writes recycle pages."""
    path = folder / "filler"
    if not path.exists():
        available = (
            int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10
        )
        size = min(int(available * 0.45), 8 << 30)
        block = bytes(64 << 20)
        with path.open("wb") as file:
            for _ in range(size // len(block)):
                file.write(block)
            os.fsync(file.fileno())
    with path.open("rb", buffering=0) as file:
        room = bytearray(64 << 20)
        while file.readinto(room):
            pass


def drop_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm_page_cache(folder: Path) -> None:
    room = bytearray(64 << 20)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(room):
                    pass


@functools.cache
def touched(size: int) -> mmap.mmap:
    """Memory that is ready, of huge pages: from scattered ones the disk needs several requests per write."""
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, np.uint8)[:] = 1
    return memory


def direct_limit(path: Path, nbytes: int, threads: int, megabytes: int, *, read: bool) -> float:
    """Seconds to write or read so many bytes past the page cache, from or to memory that is ready."""
    block = megabytes * MEGABYTE
    memory = memoryview(touched(16 * MEGABYTE))
    flags = os.O_RDONLY if read else os.O_WRONLY | os.O_CREAT
    descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
    started = time.perf_counter()
    if not read:
        os.posix_fallocate(descriptor, 0, nbytes)

    def move(index: int) -> None:
        view = memory[index * block : (index + 1) * block]
        for start in range(index * block, nbytes, threads * block):
            part = view[: -(-min(block, nbytes - start) // 4096) * 4096]
            os.preadv(descriptor, [part], start) if read else os.pwrite(descriptor, part, start)

    run_threads(threads, move)
    if not read:
        os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - started


def memcpy_limit(state: State, threads: int) -> float:
    """Seconds to copy the state into memory that is ready, on so many threads."""
    target = np.frombuffer(touched(state.nbytes), np.uint8)
    sources, position = [], 0
    for tensor in state.tensors.values():
        data = tensor.view(-1).view(torch.uint8).numpy()
        sources.append((data, target[position : position + len(data)]))
        position += len(data)

    def copy(index: int) -> None:
        for source, place in sources[index::threads]:
            np.copyto(place, source)

    started = time.perf_counter()
    run_threads(threads, copy)
    return time.perf_counter() - started


def run_threads(count: int, work) -> None:
    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def timed(work) -> float:
    gc.collect()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextlib.contextmanager
def fresh(folder: Path):
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def dcp_writer(path: Path, threads: int):
    import torch.distributed.checkpoint as dcp

    return dcp.FileSystemWriter(path, thread_count=threads, sync_files=True, overwrite=True)


def savers(state: State):
    """name → function(folder) that saves durably."""
    import torch.distributed.checkpoint as dcp

    def ours(folder: Path) -> None:
        checkpoint = DistributedCheckpoint(SingleProcess(), LocalStore(folder))
        checkpoint.save(state, options=SaveOptions(include_rng_state=False))
        checkpoint.close()

    def torch_save(folder: Path) -> None:
        torch.save(state.tensors, folder / "state.pt")
        sync(folder / "state.pt")

    def safetensors_save(folder: Path) -> None:
        save_file(state.tensors, folder / "state.safetensors")
        sync(folder / "state.safetensors")

    def dcp_save(threads: int, folder: Path) -> None:
        dcp.save(state.tensors, storage_writer=dcp_writer(folder / "dcp", threads), no_dist=True)
        sync_folder(folder)

    return {
        "tensorforge": ours,
        "torch.save": torch_save,
        "safetensors": safetensors_save,
        **{f"DCP, {n} threads": functools.partial(dcp_save, n) for n in (1, 2, 4, 8)},
    }


def bench_save(
    state: State, folder: Path, repeats: int, *, full: bool
) -> tuple[dict[str, float], list[float], list[float]]:
    """Rates, the limit's among them; then ours ÷ the limit, and ours ÷ DCP at its best, turn by turn."""
    limits = {f"limit, {t} x {m} MB": (t, m) for t, m in WRITE_LIMITS}
    candidates = savers(state)

    def measure(name: str) -> float:
        if full:
            fill_page_cache(folder)
        with fresh(folder) as place:
            if name in limits:
                return direct_limit(place / "limit", state.nbytes, *limits[name], read=False)
            return timed(lambda: candidates[name](place))

    seconds = defaultdict(list)
    for _ in range(repeats):
        for name in random.sample([*candidates, *limits], len(candidates) + len(limits)):
            seconds[name].append(measure(name))
    top = min(limits, key=lambda name: statistics.median(seconds[name]))
    shares = paired(lambda: measure("tensorforge"), lambda: measure(top), 2 * repeats)
    values = rates(seconds, state.nbytes)
    best = max((name for name in candidates if name.startswith("DCP")), key=values.__getitem__)
    leads = paired(lambda: measure("tensorforge"), lambda: measure(best), repeats)
    values["O_DIRECT " + top] = values[top]
    return {name: value for name, value in values.items() if name not in limits}, shares, leads


def paired(ours, other, count: int) -> list[float]:
    """Other ÷ ours in seconds, each of ours beside the others before and after it; sorted."""
    shares, before = [], other()
    for _ in range(count):
        took, after = ours(), other()
        shares.append((before + after) / 2 / took)
        before = after
    return sorted(shares)


def rates(seconds: dict[str, list[float]], nbytes: int) -> dict[str, float]:
    return {name: nbytes / statistics.median(times) / 1e6 for name, times in seconds.items()}


def bench_load(
    state: State, folder: Path, repeats: int, *, cold: bool
) -> tuple[dict[str, float], list[float]]:
    """Rates, and our load's share of safetensors' rate, measured in turns."""
    import torch.distributed.checkpoint as dcp

    target = State(state.nbytes, fill=False)
    module = Module(target)
    source = Module(state)
    with fresh(folder) as place:
        store = LocalStore(place / "ours")
        checkpoint = DistributedCheckpoint(SingleProcess(), store)
        checkpoint.save(source, options=SaveOptions(checkpoint_prefix="c", include_rng_state=False))
        save_file(state.tensors, place / "state.safetensors")
        torch.save(state.tensors, place / "state.pt")
        dcp.save(state.tensors, storage_writer=dcp_writer(place / "dcp", 4), no_dist=True)
        sync_folder(place)

        def ours() -> None:
            checkpoint.load(module, options=LoadOptions(load_rng_state=False))

        def safetensors_load() -> None:
            target.load_state_dict(load_file(place / "state.safetensors"))

        def torch_load(*, mapped: bool) -> None:
            target.load_state_dict(torch.load(place / "state.pt", mmap=mapped))

        def dcp_load() -> None:
            dcp.load(target.tensors, checkpoint_id=str(place / "dcp"), no_dist=True)

        candidates = {
            "tensorforge, verified": ours,
            "safetensors + copy": safetensors_load,
            "torch.load + copy": functools.partial(torch_load, mapped=False),
            "torch.load mmap + copy": functools.partial(torch_load, mapped=True),
            "DCP in place": dcp_load,
        }
        shard = next((place / "ours").rglob("*.safetensors"))
        limits = {f"limit, {t} x {m} MB": (t, m) for t, m in READ_LIMITS} if cold else {}

        def measure(name: str) -> float:
            drop_page_cache(place) if cold else warm_page_cache(place)
            if name in limits:
                return direct_limit(shard, shard.stat().st_size, *limits[name], read=True)
            took = timed(candidates[name])
            check_and_spoil(state, target)
            return took

        seconds = defaultdict(list)
        for _ in range(repeats):
            for name in random.sample([*candidates, *limits], len(candidates) + len(limits)):
                seconds[name].append(measure(name))
        shares = paired(
            lambda: measure("tensorforge, verified"),
            lambda: measure("safetensors + copy"),
            2 * repeats,
        )
        checkpoint.close()
    values = rates(seconds, state.nbytes)
    if limits:
        top = max(limits, key=values.__getitem__)
        values["O_DIRECT " + top] = values[top]
    return {name: value for name, value in values.items() if name not in limits}, shares


def check_and_spoil(state: State, target: State) -> None:
    """What was loaded is right; the next load must not find it there."""
    for saved, loaded in zip(state.tensors.values(), target.tensors.values(), strict=True):
        assert saved[0, 0] == loaded[0, 0]
        assert saved[-1, -1] == loaded[-1, -1]
        loaded[0, 0] = loaded[-1, -1] = -2


def bench_async(state: State, folder: Path, repeats: int) -> dict[str, float]:
    """Seconds per GB until the state may change, ours and DCP's in turns."""
    stalls = defaultdict(list)
    with fresh(folder) as place, fresh(folder) as other, dcp_turns(state.nbytes, other) as theirs:
        checkpoint = DistributedCheckpoint(SingleProcess(), LocalStore(place))
        for number in range(repeats + 1):
            for threads in (1, 2):
                stalls[f"limit: memcpy, {threads} threads"].append(memcpy_limit(state, threads))
            for tensor in state.tensors.values():
                tensor[0, 0] = number
            started = time.perf_counter()
            handle = checkpoint.async_save(state, options=SaveOptions(include_rng_state=False))
            found = {"tensorforge": time.perf_counter() - started}
            handle.result()
            checkpoint.delete_checkpoint(handle.prefix)
            found |= theirs(number)
            for name, stall in found.items():
                stalls[name if number else f"{name}, first"].append(stall)
        checkpoint.close()
    return {name: statistics.median(times) / (state.nbytes / 1e9) for name, times in stalls.items()}


@contextlib.contextmanager
def dcp_turns(nbytes: int, folder: Path):
    """DCP in a process of its own, which it needs for a process group: a function that has it save once."""
    command = [sys.executable, __file__, "--dcp-async", str(nbytes), "--folder", str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:

        def save(number: int) -> dict[str, float]:
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield save
        process.stdin.close()


def dcp_async(nbytes: int, folder: Path) -> None:
    """For each line that comes in, the stalls of one save each way."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    state = State(nbytes, fill=True)
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )
    ways = {"DCP default": {}, "DCP, reused stager": {"async_stager": stager}}
    for line in sys.stdin:
        stalls = {}
        for name, options in ways.items():
            place = folder / f"{name}-{line.strip()}".replace(" ", "-")
            started = time.perf_counter()
            future = dcp.async_save(state.tensors, storage_writer=dcp_writer(place, 4), **options)
            stalls[name] = time.perf_counter() - started
            (future.upload_completion if hasattr(future, "upload_completion") else future).result()
            shutil.rmtree(place, ignore_errors=True)
        print(json.dumps(stalls), flush=True)
    stager.close()
    dist.destroy_process_group()


RESHARD = [(4, 2), (2, 4)]


def bench_reshard(nbytes: int, folder: Path, repeats: int) -> dict[str, float]:
    """Seconds of the slowest rank, loading on another number of processes than saved."""
    seconds = {}
    for source, target in RESHARD:
        for peer in ("tensorforge", "DCP"):
            with fresh(folder) as place:
                for action, ranks in (("save", source), ("load", target)):
                    words = [peer, action, str(ranks), str(nbytes), str(repeats)]
                    done = subprocess.run(
                        [sys.executable, __file__, "--reshard", *words, "--folder", str(place)],
                        capture_output=True,
                        text=True,
                        check=False,
                    )
                    if done.returncode:
                        print(peer, action, "failed:", done.stderr[-1500:])
                    elif action == "load":
                        rounds = [
                            json.loads(line) for line in done.stdout.splitlines() if line[:1] == "["
                        ]
                        slowest = [max(times) for times in zip(*rounds, strict=True)]
                        seconds[f"{peer} {source}→{target}"] = statistics.median(slowest)
    return seconds


def reshard_worker(
    peer: str, action: str, ranks: int, nbytes: int, repeats: int, folder: Path
) -> None:
    """Import torch once, fork the ranks."""
    torch.set_num_threads(1)
    store = folder / f"store-{action}"
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            try:
                reshard_rank(peer, action, rank, ranks, nbytes, repeats, folder, store)
                os._exit(0)
            except BaseException:  # noqa: BLE001  the parent sees the exit code
                import traceback

                traceback.print_exc()
                os._exit(1)
        children.append(pid)
    sys.exit(sum(os.waitpid(pid, 0)[1] != 0 for pid in children))


def reshard_rank(peer, action, rank, ranks, nbytes, repeats, folder, store) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    from tensorforge.checkpoint import TorchDistributed

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    count = 24
    rows = nbytes // 4 // 1024 // count // 12 * 12
    local = {
        f"layers.{index}": torch.full(
            (rows // ranks, 1024), float(index) if action == "save" else -1.0
        )
        for index in range(count)
    }
    tensors = {name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in local.items()}
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name.replace(".", "_"), tensor)
    checkpoint = DistributedCheckpoint(TorchDistributed(), LocalStore(folder / "ours"), timeout=120)
    times = []
    for _ in range(repeats if action == "load" else 1):
        for tensor in local.values():
            tensor[0, 0] = -1.0 if action == "load" else tensor[0, 0]
        if action == "load":
            warm_page_cache(folder)
        dist.barrier()
        started = time.perf_counter()
        if peer == "tensorforge" and action == "save":
            checkpoint.save(module, options=SaveOptions(include_rng_state=False))
        elif peer == "tensorforge":
            checkpoint.load(module, options=LoadOptions(load_rng_state=False))
        elif action == "save":
            dcp.save(tensors, storage_writer=dcp_writer(folder / "dcp", 4))
        else:
            dcp.load(tensors, checkpoint_id=str(folder / "dcp"))
        times.append(time.perf_counter() - started)
        for index, tensor in enumerate(local.values()):
            assert tensor[0, 0] == index
            assert tensor[-1, -1] == index
    # One write, or the lines of ranks that share the pipe could mix.
    os.write(1, (json.dumps(times) + "\n").encode())
    dist.barrier()
    dist.destroy_process_group()


def show(title: str, values: dict[str, float], unit: str) -> None:
    print(f"\n{title}")
    best = next((value for name, value in values.items() if "O_DIRECT" in name), None)
    for name, value in sorted(values.items(), key=lambda item: -item[1]):
        share = f"  {value / best:5.2f} of the limit" if best else ""
        print(f"  {name:32} {value:9.2f} {unit}{share}")


def spread(ordered: list[float]) -> str:
    quarter = len(ordered) // 4
    low, high = ordered[quarter], ordered[-1 - quarter]
    return (
        f"half between {low:.2f} and {high:.2f}, all between {ordered[0]:.2f} and {ordered[-1]:.2f}"
    )


class Verdict:
    """The aims, and whether they were met."""

    def __init__(self) -> None:
        self.missed = 0

    def aim(self, text: str, value: float, wanted: float, *, at_most: bool = False) -> None:
        met = value <= wanted if at_most else value >= wanted
        self.missed += not met
        sign = "≤" if at_most else "≥"
        print(f"  {'met   ' if met else 'MISSED'} {text}: {value:.2f} (aim {sign} {wanted:g})")


def run_save(state: State, folder: Path, repeats: int, verdict: Verdict) -> None:
    for full in (False, True):
        values, shares, leads = bench_save(state, folder, repeats, full=full)
        case = "page cache full" if full else "page cache as it comes"
        show(f"durable save, {case}", values, "MB/s")
        ours = values["tensorforge"]
        print(f"  in turns with the limit, {len(shares)} times: {spread(shares)}")
        verdict.aim("durable save ÷ O_DIRECT limit, in turns", statistics.median(shares), 0.85)
        verdict.aim("durable save ÷ safetensors", ours / values["safetensors"], 1)
        print(f"  in turns with DCP at its best, {len(leads)} times: {spread(leads)}")
        verdict.aim("durable save ÷ DCP at its best, in turns", statistics.median(leads), 1)
    for path in folder.glob("filler"):
        path.unlink()


def run_load(state: State, folder: Path, repeats: int, verdict: Verdict) -> None:
    for case in ("warm", "cold"):
        values, shares = bench_load(state, folder, repeats, cold=case == "cold")
        show(f"load into existing tensors, {case}", values, "MB/s")
        ours = values["tensorforge, verified"]
        if case == "warm":
            verdict.aim("warm load ÷ DCP", ours / values["DCP in place"], 2)
        print(f"  in turns with safetensors + copy, {len(shares)} times: {spread(shares)}")
        share = statistics.median(shares)
        verdict.aim(f"{case} load ÷ safetensors + copy, in turns", share, 0.7)


def run_async(state: State, folder: Path, repeats: int, verdict: Verdict) -> None:
    values = bench_async(state, folder, repeats)
    show("async_save: stall until the weights may change", values, "s/GB")
    ours = values["tensorforge"]
    default, reused = values["DCP default"], values["DCP, reused stager"]
    verdict.aim("stall ÷ dcp.async_save default", ours / default, 0.5, at_most=True)
    verdict.aim("stall ÷ its reused stager", ours / reused, 1, at_most=True)


def run_reshard(state: State, folder: Path, repeats: int, verdict: Verdict) -> None:
    values = bench_reshard(state.nbytes, folder, repeats)
    show("resharding load, warm", values, "s")
    for source, target in RESHARD:
        ours, theirs = (values.get(f"{peer} {source}→{target}") for peer in ("tensorforge", "DCP"))
        if ours and theirs:
            verdict.aim(f"resharding {source}→{target}, DCP ÷ ours", theirs / ours, 1.5)


PARTS = {"save": run_save, "load": run_load, "async": run_async, "reshard": run_reshard}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="0.25 GB, three repeats")
    parser.add_argument("--gigabytes", type=float, nargs="*", default=None)
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--folder", type=Path, default=None, help="where to write")
    parser.add_argument("--reshard", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--dcp-async", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reshard:
        peer, action, *numbers = options.reshard
        reshard_worker(peer, action, *map(int, numbers), options.folder)
    if options.dcp_async:
        dcp_async(options.dcp_async, options.folder)
        return
    sizes = options.gigabytes or ([0.25] if options.quick else [1.0, 3.0])
    repeats = options.repeats or (3 if options.quick else 5)
    verdict = Verdict()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-bench-", dir=options.folder))
    try:
        for size in sizes:
            state = State(int(size * 1e9), fill=True)
            print(
                f"\n=== {state.nbytes / 1e9:.2f} GB in {len(state.tensors)} tensors, median of {repeats}",
                flush=True,
            )
            for part in options.only:
                PARTS[part](state, folder, repeats, verdict)
                sys.stdout.flush()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{verdict.missed} aims missed")


if __name__ == "__main__":
    main()
