"""What incremental checkpoints cost: bytes written, and time to restore.

Three kinds of training, each saved after every so many steps:

- frozen backbone: small adapters train on top of a large model that does not change;
- sparse embedding: each step touches a few rows of a large table;
- dense: AdamW moves every weight and both moments.

Beside our bytes stand those of a full save of the same state, and the limit: the bytes of the elements that
truly changed since the last save. Nobody else offers increments of such checkpoints, so the peer is the full
save.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
from torch import nn

from tensorforge.catalog import (
    CheckpointManager,
    CheckpointType,
    IncrementPolicy,
    RunCheckpoints,
    remover,
)
from tensorforge.checkpoint import DistributedCheckpoint, LoadOptions, SaveOptions, SingleProcess
from tensorforge.storage.local_store import LocalStore

AIM = 1.1
OPTIONS = SaveOptions(include_rng_state=False)


class Adapters(nn.Module):
    """A frozen model with a low-rank addition to each layer."""

    def __init__(self, width: int, layers: int, rank: int = 8) -> None:
        super().__init__()
        self.backbone = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(layers))
        self.backbone.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, down, up in zip(self.backbone, self.down, self.up, strict=True):
            x = torch.relu(layer(x) + up(down(x)))
        return x


class Table(nn.Module):
    """A large embedding, of which a step touches a few rows."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.rows = rows
        self.embedding = nn.Embedding(rows, width, sparse=True)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.embedding(index)


class Dense(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(each for _ in range(layers) for each in (nn.Linear(width, width), nn.GELU()))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def frozen(scale: int):
    model = Adapters(256 * scale, 12)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-3), lambda: torch.randn(16, 256 * scale)


def sparse(scale: int):
    model = Table(25_000 * scale * scale, 64)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-3)
    return model, optimizer, lambda: torch.randint(model.rows, (model.rows // 100,))


def dense(scale: int):
    model = Dense(256 * scale, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return model, optimizer, lambda: torch.randn(16, 256 * scale)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"model/{name}": t.clone() for name, t in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if torch.is_tensor(value):
                found[f"optimizer/{number}/{name}"] = value.clone()
    return found


def changed_bytes(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> int:
    total = 0
    for name, tensor in new.items():
        before = old.get(name)
        differs = tensor.numel() if before is None else int((tensor != before).sum())
        total += differs * tensor.element_size()
    return total


class Bench:
    def __init__(self, folder: Path, max_chain: int) -> None:
        self.store = LocalStore(folder / "blobs")
        self.manager = CheckpointManager(
            database=folder / "catalog.db", remove_files=remover(self.store)
        )
        self.checkpoint = DistributedCheckpoint(SingleProcess(), self.store)
        self.runs = RunCheckpoints(
            self.manager, self.checkpoint, "bench", increments=IncrementPolicy(max_chain=max_chain)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.runs.close()
        self.checkpoint.close()
        self.manager.close()

    def save(self, model, optimizer, step: int, kind: CheckpointType | None = None):
        started = time.perf_counter()
        record = self.runs.save(
            model, optimizer, epoch=0, step=step, checkpoint_type=kind, options=OPTIONS
        )
        return record, time.perf_counter() - started


def train(model, optimizer, batch: Callable[[], torch.Tensor], steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()


def measure_writes(name: str, build, scale: int, saves: int, steps: int, aim: float | None) -> None:
    torch.manual_seed(0)
    model, optimizer, batch = build(scale)
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder), saves + 1) as bench:
        train(model, optimizer, batch, 2)
        full, full_seconds = bench.save(model, optimizer, 0)
        ours, changed, seconds = [], [], []
        before = tensors_of(model, optimizer)
        for number in range(1, saves + 1):
            train(model, optimizer, batch, steps)
            after = tensors_of(model, optimizer)
            record, took = bench.save(model, optimizer, number)
            ours.append(record.size_bytes)
            changed.append(changed_bytes(before, after))
            seconds.append(took)
            before = after
    written, limit = statistics.median(ours), statistics.median(changed)
    verdict = (
        "" if aim is None else f"aim <= {aim:g}: {'met' if written <= aim * limit else 'missed'}"
    )
    print(
        f"{name:18} full {full.size_bytes / 1e6:8.2f} MB {full_seconds:6.2f} s   ours "
        f"{written / 1e6:8.2f} MB {statistics.median(seconds):6.2f} s   changed {limit / 1e6:8.2f} MB   "
        f"ours/full {written / full.size_bytes:6.3f}   ours/changed {written / limit:6.3f}  {verdict}"
    )


def measure_restores(scale: int, lengths: list[int]) -> None:
    torch.manual_seed(0)
    model, optimizer, batch = dense(scale)
    longest = max(lengths)
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder), longest + 1) as bench:
        records = {}
        for number in range(1, longest + 1):
            train(model, optimizer, batch, 1)
            records[number], _ = bench.save(model, optimizer, number)
        expected = tensors_of(model, optimizer)
        alone, _ = bench.save(model, optimizer, longest, CheckpointType.FULL)
        prefixes = {length: records[length].storage_path for length in lengths}
        print(
            f"\nrestoring the dense model ({alone.size_bytes / 1e6:.0f} MB), verified, median of 3:"
        )
        limit = restore_seconds(bench, model, optimizer, alone.storage_path)
        print(f"{'a full save of the same state (limit)':40} {limit:6.2f} s")
        for length, prefix in prefixes.items():
            figure = restore_seconds(bench, model, optimizer, prefix)
            size = sum(records[n].size_bytes for n in range(1, length + 1))
            print(
                f"{f'chain of {length}':40} {figure:6.2f} s   {figure / limit:5.2f} x limit   "
                f"{size / 1e6:8.0f} MB in the chain"
            )
        found = tensors_of(model, optimizer)
        same = all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        print(f"{'the longest chain gives the same bits':40} {'yes' if same else 'NO'}")
        started = time.perf_counter()
        bench.runs.wait()
        last = bench.manager.get(records[longest].checkpoint_id)
        bench.runs.compact(last.checkpoint_id)
        took = time.perf_counter() - started
        figure = restore_seconds(bench, model, optimizer, last.storage_path)
        print(
            f"{f'the chain of {longest}, compacted in {took:.1f} s':40} {figure:6.2f} s   "
            f"{figure / limit:5.2f} x limit"
        )


def restore_seconds(bench: Bench, model, optimizer, prefix: str) -> float:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        bench.checkpoint.load(model, optimizer, LoadOptions(checkpoint_prefix=prefix))
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model and short chains")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    scale, saves, lengths = (1, 3, [1, 4]) if options.quick else (4, 5, [1, 8, 32])
    free = shutil.disk_usage(tempfile.gettempdir()).free
    print(f"scale {scale}, {saves} saves each, {free / 1e9:.0f} GB free")
    measure_writes("frozen backbone", frozen, scale, saves, 10, AIM)
    measure_writes("sparse embedding", sparse, scale, saves, 1, AIM)
    measure_writes("dense, 1 step", dense, scale, saves, 1, None)
    measure_writes("dense, 10 steps", dense, scale, saves, 10, None)
    measure_restores(max(1, scale // 2), lengths)


if __name__ == "__main__":
    main()
