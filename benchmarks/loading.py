"""Training on images that must be unpacked: batches loaded ahead, beside torch's `DataLoader`, in one run.

    python benchmarks/loading.py [--quick]

Three parts: steps per second of one worker with one loading process, beside a plain loop over a `DataLoader`
with one worker process and beside the same loop on batches that lie ready in memory (the limit); and how fast
large batches come over from the process.
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset

from tensorforge.train import Loading, Run, RunConfig

SIDE, BATCH, SHARDS = 96, 32, 4


class Images(Dataset):
    """Packed images; each is unpacked, scaled and, by chance, mirrored."""

    def __init__(self, samples: int) -> None:
        random = np.random.default_rng(0)
        smooth = random.integers(0, 256, (16, 3, SIDE // 8, SIDE // 8), dtype=np.uint8)
        packed = [
            zlib.compress(np.kron(each, np.ones((8, 8), np.uint8)).tobytes()) for each in smooth
        ]
        self._packed = [packed[number % 16] for number in range(samples)]

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raw = bytearray(zlib.decompress(self._packed[index]))
        image = torch.frombuffer(raw, dtype=torch.uint8).reshape(3, SIDE, SIDE).float() / 255
        image = (image - image.mean(dim=(1, 2), keepdim=True)) / (image.std() + 1e-3)
        return (image.flip(2) if torch.rand(()) < 0.5 else image), index % 10


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def ours(images: Images, processes: int) -> list[float]:
    """Seconds per step."""
    model, times = make_model(), []
    config = RunConfig(batch_size=BATCH, shards=SHARDS)
    loading = Loading(num_workers=processes, prefetch_factor=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Run(model, optimizer, images, config, loading=loading) as run:
        started = time.perf_counter()
        for step in run.steps(epochs=1):
            for x, y in step.batches():
                step.backward(F.cross_entropy(model(x), y))
            step.commit()
            times.append(time.perf_counter() - started)
            started = time.perf_counter()
    return times


def plain(batches: Callable[[], Iterator[list[torch.Tensor]]]) -> list[float]:
    """Seconds per step of the loop that people write by hand, accumulating as ours."""
    model, times = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    source = batches()
    started = time.perf_counter()
    while True:
        for _ in range(SHARDS):
            found = next(source, None)
            if found is None:
                return times
            (F.cross_entropy(model(found[0]), found[1]) / SHARDS).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - started)
        started = time.perf_counter()


class Large(Dataset):
    """Samples that cost nothing to make, but to carry."""

    def __init__(self, samples: int, floats: int) -> None:
        self._samples, self._one = samples, torch.zeros(floats)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._one


def carried(batches: Iterator[torch.Tensor]) -> float:
    """Bytes per second, the first batches aside; each is read once."""
    sizes, started = 0, 0.0
    for number, batch in enumerate(batches):
        if number == 4:
            sizes, started = 0, time.perf_counter()
        sizes += batch.nbytes
        float(batch[0, 0])
    return sizes / (time.perf_counter() - started)


def carried_by_us(large: Large) -> float:
    config = RunConfig(batch_size=32, shards=1)
    model = nn.Linear(1, 1)

    def batches() -> Iterator[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with Run(model, optimizer, large, config, loading=Loading(num_workers=1)) as run:
            for step in run.steps(epochs=1):
                for batch in step.batches():
                    yield batch
                    step.backward(model(torch.zeros(1, 1)).mean())
                step.commit()

    return carried(batches())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rounds, samples = (1, 1600) if quick else (5, 3200)
    torch.set_num_threads(1)
    images, micro = Images(samples), BATCH // SHARDS
    ready = [next(iter(DataLoader(images, batch_size=micro)))] * (samples // micro)

    def loader() -> Iterator[list[torch.Tensor]]:
        return iter(
            DataLoader(images, batch_size=micro, shuffle=True, num_workers=1, prefetch_factor=8)
        )

    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        found.setdefault("loaded when needed", []).extend(ours(images, 0)[5:])
        found.setdefault("loaded ahead", []).extend(ours(images, 1)[5:])
        found.setdefault("a loop over a DataLoader", []).extend(plain(loader)[5:])
        found.setdefault("a loop over memory (limit)", []).extend(plain(lambda: iter(ready))[5:])
    speed = {name: 1 / statistics.mean(times) for name, times in found.items()}
    for name, value in speed.items():
        print(f"{name:28} {value:7.1f} steps/s", flush=True)
    us = speed["loaded ahead"]
    print(f"  ahead / when needed          {us / speed['loaded when needed']:.2f}")
    print(f"  ahead / DataLoader           {us / speed['a loop over a DataLoader']:.2f}")
    print(f"  ahead / limit                {us / speed['a loop over memory (limit)']:.2f}")

    large = Large(32 * (20 if quick else 60), 192 * 1024)
    mine, theirs = [], []
    for _ in range(rounds):
        mine.append(carried_by_us(large))
        theirs.append(carried(iter(DataLoader(large, batch_size=32, num_workers=1))))
    ours_rate, peer = statistics.median(mine), statistics.median(theirs)
    print(f"batches of 25 MB: {ours_rate / 1e9:.2f} GB/s, DataLoader {peer / 1e9:.2f} GB/s", end="")
    print(f": ratio {ours_rate / peer:.2f}")


if __name__ == "__main__":
    main()
