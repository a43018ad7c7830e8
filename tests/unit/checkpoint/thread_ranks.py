"""Ranks that are threads: saves and loads of tensors that each rank has a shard of."""

from concurrent.futures import ThreadPoolExecutor

import torch

from tensorforge.checkpoint import (
    DistributedCheckpoint,
    InMemoryRanks,
    LoadOptions,
    SaveOptions,
    ShardingSpec,
    TensorShard,
)

SPEC = ShardingSpec({"rows": 0, "columns": 1, "few": 0, "flat": 0})


class State:
    """What one rank holds of a state, cut by the spec."""

    def __init__(self, tensors, rank=0, world_size=1):
        self.tensors = {
            name: SPEC.local(name, tensor, rank, world_size) for name, tensor in tensors.items()
        }

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        for name, value in state.items():
            mine = self.tensors[name]
            (mine.tensor if isinstance(mine, TensorShard) else mine).copy_(value)


def make_tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(37, 5, generator=generator),
        "columns": torch.randn(6, 11, generator=generator),
        "few": torch.randn(2, 3, generator=generator),
        "flat": torch.randn(1000, generator=generator).bfloat16(),
        "replicated": torch.randn(600, 500, generator=generator),
        "scalar": torch.tensor(3.5),
    }


def zeros_like(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def on_ranks(world_size, work):
    """Run `work(rank, coordinator)` on every rank at once and return what each returned or raised."""
    ranks = InMemoryRanks(world_size)

    def run(rank):
        try:
            return work(rank, ranks.coordinator(rank))
        except Exception as error:  # noqa: BLE001  the tests look at it
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def save(store, world_size, tensors, **options):
    def work(rank, coordinator):
        checkpoint = DistributedCheckpoint(coordinator, store, timeout=30)
        return checkpoint.save(State(tensors, rank, world_size), options=SaveOptions(**options))

    return on_ranks(world_size, work)


def load(store, world_size, like, **options):
    """Load on so many ranks and put the whole state together again."""
    states = [State(zeros_like(like), rank, world_size) for rank in range(world_size)]

    def work(rank, coordinator):
        checkpoint = DistributedCheckpoint(coordinator, store, timeout=30)
        return checkpoint.load(states[rank], options=LoadOptions(**options))

    results = on_ranks(world_size, work)
    whole = zeros_like(like)
    for state in states:
        for name, value in state.tensors.items():
            if isinstance(value, TensorShard):
                for dimension, start in enumerate(value.offset):
                    if value.tensor.shape[dimension] != whole[name].shape[dimension]:
                        whole[name].narrow(dimension, start, value.tensor.shape[dimension]).copy_(
                            value.tensor
                        )
                        break
                else:
                    whole[name].copy_(value.tensor)
            else:
                whole[name] = value
    return results, whole


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
