"""A model with tied weights."""

import torch
from torch import nn

from tensorforge.checkpoint import DistributedCheckpoint, SaveOptions, SingleProcess


class Tied(nn.Module):
    def __init__(self, seed, *, tied=True):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(50, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, index):
        return self.head(self.body(self.embed(index)))


def save(store, model, optimizer=None, **options):
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    checkpoint.save(model, optimizer, SaveOptions(checkpoint_prefix="c", **options))
    return checkpoint
