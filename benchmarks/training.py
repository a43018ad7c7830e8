"""Steps per second of exact training beside plain DDP on gloo, same model, same global batch, in one run.

    python benchmarks/training.py [--quick]

DDP accumulates as many micro-batches per worker as there are shards per worker, without communication
for all but the last, so both sides do the same arithmetic; ours adds up along the tree, seeds every
shard and votes before each update. Both take their steps in turns, so that whatever else the machine does
meets both alike.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from tensorforge.testing.training_cluster import forking_context
from tensorforge.train.group.membership import FixedMembership
from tensorforge.train.loop.run import Run
from tensorforge.train.run_config import RunConfig

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


class Turns:
    """A member's side of taking turns: a step begins when it is told to, and ends when it asks again."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._started = 0.0

    def wait(self) -> None:
        """The step before is over; wait for the next one."""
        self._pipe.send(time.perf_counter() - self._started)
        self._pipe.recv()
        self._started = time.perf_counter()


def ours(
    rank: int, world: int, port: int, shards: int, micro: int, steps: int, turns: Turns
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = RunConfig(batch_size=shards * micro, shards=shards)
    membership = FixedMembership(rank, world, f"127.0.0.1:{port}")
    samples = data(shards * micro * steps)
    with Run(model, optimizer, samples, config, membership=membership) as run:
        for step in run.steps(total=steps):
            turns.wait()
            for x, y in step.batches():
                step.backward(loss_of(model, x, y))
            step.commit()


def ddp(
    rank: int, world: int, port: int, shards: int, micro: int, steps: int, turns: Turns
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    model = Transformer()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    samples = data(shards * micro * steps)
    mine = range(shards * rank // world, shards * (rank + 1) // world)
    for step in range(steps):
        turns.wait()
        optimizer.zero_grad(set_to_none=True)
        for shard in mine:
            begin = (step * shards + shard) * micro
            x, y = samples[begin : begin + micro]
            quiet = wrapped.no_sync() if shard != mine[-1] else contextlib.nullcontext()
            with quiet:
                (loss_of(wrapped, x, y) * (world / shards)).backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


class Side:
    """The members of one side; they rest while the other side takes its step."""

    def __init__(self, function: Any, world: int, shards: int, micro: int, steps: int) -> None:
        context, port = forking_context(), free_port()
        self._pipes = []
        self._members = []
        for rank in range(world):
            here, there = context.Pipe()
            settings = (rank, world, port, shards, micro, steps)
            member = context.Process(target=take_part, args=(there, function, *settings))
            member.start()
            self._pipes.append(here)
            self._members.append(member)
        self._hear()

    def step(self) -> float:
        """Take one step; its seconds are the slowest member's."""
        for pipe in self._pipes:
            pipe.send(None)
        return self._hear()

    def close(self) -> None:
        """Wait until all have ended."""
        for member in self._members:
            member.join()

    def _hear(self) -> float:
        return max(pipe.recv() for pipe in self._pipes)


def take_part(pipe: Connection, function: Any, *settings: int) -> None:
    function(*settings, Turns(pipe))
    pipe.send(0.0)  # the last step is over


def compare(world: int, shards: int, micro: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds per step of both sides, in turns; who begins changes with every turn."""
    sides = [Side(function, world, shards, micro, steps + 2) for function in (ours, ddp)]
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(steps + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            seconds = sides[which].step()
            if turn:  # the first step allocates
                times[which].append(seconds)
    for side in sides:
        side.step()
        side.close()
    return times


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    steps = 5 if quick else 30
    size = sum(p.numel() for p in Transformer().parameters())
    print(f"{size / 1e6:.1f} M parameters, sequences of {LENGTH}, one thread per process")
    cases = [(2, 4, 8), (2, 8, 4), (2, 16, 2), (3, 12, 2)]
    for world, shards, micro in cases[1:2] if quick else cases:
        mine, theirs = compare(world, shards, micro, steps)
        ratios = [their / my for my, their in zip(mine, theirs, strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        best = min(theirs) / min(mine)
        aim = ""
        if shards % world == 0 and world == 2:
            aim = f"  (aim: at least {AIM:.2f}: {'met' if ratio >= AIM else 'missed'})"
        print(
            f"{world} workers, {shards:2} shards of {micro}: ours {1 / statistics.median(mine):.3f} steps/s, "
            f"DDP {1 / statistics.median(theirs):.3f} steps/s: ratio in turns {ratio:.3f} "
            f"(half between {low:.3f} and {high:.3f}), of the best steps {best:.3f}{aim}",
            flush=True,
        )


if __name__ == "__main__":
    main()
