"""Small models and optimizers, and whether two states are equal."""

import torch
from torch import nn


def build(seed=0, width=64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


def train(model, optimizer, steps=2):
    for step in range(steps):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()


def trained(seed=0, make=torch.optim.AdamW, **options):
    model = build(seed)
    optimizer = make(model.parameters(), **(options or {"lr": 0.01}))
    train(model, optimizer)
    return model, optimizer


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class OneTensor:
    """A state with one tensor."""

    def __init__(self, value=0.0, size=1_000_000):
        self.tensors = {"x": torch.full((size,), float(value))}

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        self.tensors = state


def build_normalized(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 40)).sum().backward()
    optimizer.step()
    return model, optimizer
