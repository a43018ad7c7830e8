"""Steps per second of exact training beside plain DDP on gloo, same model, same global batch, in one run.

    python benchmarks/training.py [--quick]

DDP accumulates as many micro-batches per worker as there are shards per worker, without communication
for all but the last, so both sides do the same arithmetic; ours adds up along the tree, seeds every
shard and votes before each update.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from tensorforge.testing.cluster import forking_context
from tensorforge.train.config import RunConfig
from tensorforge.train.membership import FixedMembership
from tensorforge.train.run import Run

LENGTH, WORDS, AIM = 64, 512, 0.95


class Transformer(nn.Module):
    """About ten million parameters."""

    def __init__(self, width: int = 320, depth: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(
            width, 5, 4 * width, 0.1, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(x)))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def data(samples: int) -> TensorDataset:
    words = torch.randint(
        0, WORDS, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(0)
    )
    return TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())


def ours(rank: int, world: int, port: int, shards: int, micro: int, steps: int, answers) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = RunConfig(batch_size=shards * micro, shards=shards)
    membership = FixedMembership(rank, world, f"127.0.0.1:{port}")
    times = []
    with Run(
        model, optimizer, data(shards * micro * (steps + 1)), config, membership=membership
    ) as run:
        for step in run.steps(total=steps + 1):
            started = time.perf_counter()
            for x, y in step.batches():
                step.backward(loss_of(model, x, y))
            step.commit()
            times.append(time.perf_counter() - started)
    answers.put(times[1:])


def ddp(rank: int, world: int, port: int, shards: int, micro: int, steps: int, answers) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    model = Transformer()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    samples = data(shards * micro * (steps + 1))
    mine = range(shards * rank // world, shards * (rank + 1) // world)
    times = []
    for step in range(steps + 1):
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for shard in mine:
            begin = (step * shards + shard) * micro
            x, y = samples[begin : begin + micro]
            quiet = wrapped.no_sync() if shard != mine[-1] else contextlib.nullcontext()
            with quiet:
                (loss_of(wrapped, x, y) * (world / shards)).backward()
        optimizer.step()
        times.append(time.perf_counter() - started)
    dist.barrier()
    dist.destroy_process_group()
    answers.put(times[1:])


def run(function, world: int, shards: int, micro: int, steps: int) -> list[float]:
    """Seconds per step, each the slowest member's."""
    context = forking_context()
    answers, port = context.SimpleQueue(), free_port()
    members = [
        context.Process(target=function, args=(rank, world, port, shards, micro, steps, answers))
        for rank in range(world)
    ]
    for member in members:
        member.start()
    found = [answers.get() for _ in members]
    for member in members:
        member.join()
    return [max(each) for each in zip(*found, strict=True)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rounds, steps = (1, 3) if quick else (5, 5)
    size = sum(p.numel() for p in Transformer().parameters())
    print(f"{size / 1e6:.1f} M parameters, sequences of {LENGTH}, one thread per process")
    cases = [(2, 4, 8), (2, 8, 4), (2, 16, 2), (3, 12, 2)]
    for world, shards, micro in cases[1:2] if quick else cases:
        mine: list[float] = []
        theirs: list[float] = []
        for _ in range(rounds):
            mine += run(ours, world, shards, micro, steps)
            theirs += run(ddp, world, shards, micro, steps)
        ratio = statistics.median(theirs) / statistics.median(mine)
        best = min(theirs) / min(mine)
        aim = ""
        if shards % world == 0 and world == 2:
            aim = f"  (aim: at least {AIM:.2f}: {'met' if ratio >= AIM else 'missed'})"
        print(
            f"{world} workers, {shards:2} shards of {micro}: ours {1 / statistics.median(mine):.3f} steps/s, "
            f"DDP {1 / statistics.median(theirs):.3f} steps/s: ratio {ratio:.3f}, "
            f"of the best steps {best:.3f}{aim}",
            flush=True,
        )


if __name__ == "__main__":
    main()
