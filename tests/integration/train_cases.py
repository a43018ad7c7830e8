"""Small models and runs that the training tests share; each is deterministic from its seed."""

from __future__ import annotations

import random
import socket

import numpy as np
import torch
import torch._dynamo  # the first optimizer would import it, which leaves a folder behind
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from tensorforge.train.group.membership import FixedMembership
from tensorforge.train.loop.run import Run
from tensorforge.train.run_config import RunConfig


class Transformer(nn.Module):
    def __init__(self, words=32, width=32, length=8):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, x):
        return self.head(self.layer(self.words(x) + self.places)).transpose(1, 2)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(6 * 16, 4)

    def forward(self, x):
        return self.head(self.body(x))


class MLP(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(10, 37), nn.Tanh(), nn.Linear(37, 3))


class Noisy:
    """Draws from every random stream for each sample, as augmentations do."""

    def __init__(self, samples):
        self._samples = samples

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, index):
        x, y = self._samples[index]
        return x + torch.randn(()) * random.random() + np.random.rand(), y


def data(kind, size=203):
    generator = torch.Generator().manual_seed(5)
    if kind == "transformer":
        words = torch.randint(0, 32, (size, 9), generator=generator)
        return TensorDataset(words[:, :-1], words[:, 1:])
    if kind == "convnet":
        images = torch.randn(size, 1, 8, 8, generator=generator)
        return TensorDataset(images, torch.randint(0, 4, (size,), generator=generator))
    return TensorDataset(
        torch.randn(size, 10, generator=generator),
        torch.randint(0, 3, (size,), generator=generator),
    )


MODELS = {"mlp": MLP, "transformer": Transformer, "convnet": ConvNet}


def optimizer_for(name, model):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def make_run(
    kind,
    optimizer="adamw",
    membership=None,
    checkpoints=None,
    loading=None,
    dataset=None,
    evaluation=None,
    **settings,
):
    torch.set_num_threads(1)
    torch.manual_seed(11)
    model = MODELS[kind]()
    chosen = optimizer_for(optimizer, model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(chosen, 20)
    config = RunConfig(**({"batch_size": 30, "clip_grad_norm": 1.0, "seed": 3} | settings))
    return Run(
        model,
        chosen,
        dataset or data(kind),
        config,
        scheduler=scheduler,
        loading=loading,
        evaluation=evaluation,
        checkpoints=checkpoints,
        membership=membership,
    )


def train(run, total, *, bf16=False):
    losses = []
    with run:
        for step in run.steps(total=total):
            for x, y in step.batches():
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = F.cross_entropy(run.model(x), y)
                step.backward(loss)
            if step.commit():
                losses.append(step.metrics["loss"])
    return run.digest(), losses


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _member(rank, world_size, master, answers, kind, optimizer, total, options, settings):
    membership = FixedMembership(rank, world_size, master)
    run = make_run(kind, optimizer, membership, **settings)
    answers.put((rank, *train(run, total, **options)))


def train_fixed(context, world_size, kind, optimizer="adamw", total=9, options=None, **settings):
    """Each rank's digest and losses of a run on a fixed number of processes."""
    answers, master = context.SimpleQueue(), f"127.0.0.1:{free_port()}"
    members = [
        context.Process(
            target=_member,
            args=(
                rank,
                world_size,
                master,
                answers,
                kind,
                optimizer,
                total,
                options or {},
                settings,
            ),
        )
        for rank in range(world_size)
    ]
    for member in members:
        member.start()
    found = [answers.get() for _ in members]
    for member in members:
        member.join()
    answers.close()
    return [(digest, losses) for _, digest, losses in sorted(found)]


def work(kind, optimizer, total, options, settings):
    """What every worker of a test cluster runs."""
    train(make_run(kind, optimizer, **settings), total, **options)
