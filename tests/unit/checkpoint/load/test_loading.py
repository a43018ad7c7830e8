import random
import threading

import pytest
import torch
from tests.unit.checkpoint.thread_ranks import State, load, make_tensors, on_ranks, same, save

from tensorforge.checkpoint import (
    CheckpointFormat,
    CompressionLevel,
    DistributedCheckpoint,
    InMemoryRanks,
)
from tensorforge.storage.local_store import LocalStore
from tensorforge.storage.memory_store import MemoryStore

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")


@pytest.mark.parametrize("layout", CheckpointFormat)
@pytest.mark.parametrize(("source", "target"), [(1, 3), (4, 2), (2, 4), (3, 5), (5, 1)])
def test_any_number_of_ranks_loads_what_any_number_saved(tmp_path, layout, source, target):
    store = LocalStore(tmp_path)
    tensors = make_tensors()
    prefixes = save(store, source, tensors, format=layout)
    assert len(set(prefixes)) == 1
    assert isinstance(prefixes[0], str), prefixes[0]
    results, loaded = load(store, target, tensors)
    assert same(loaded, tensors)
    assert all(result.was_resharded == (source != target) for result in results)
    assert all(result.source_world_size == source for result in results)
    assert not [blob.key for blob in store.list() if "part-" in blob.key or "saving" in blob.key]
    store.close()


@pytest.mark.parametrize("strategy", ["parallel", "sequential"])
def test_compressed_shards_are_resharded_too(strategy):
    store, tensors = MemoryStore(), make_tensors()
    save(store, 3, tensors, compression_level=CompressionLevel.FAST)
    _, loaded = load(store, 2, tensors, resharding_strategy=strategy)
    assert same(loaded, tensors)


def test_each_rank_gets_its_own_random_state_back_and_another_world_size_derives_one():
    store, seen = MemoryStore(), {}
    lock = threading.Lock()

    def one_at_a_time(rank, coordinator):
        return DistributedCheckpoint(coordinator, store, timeout=30)

    with lock:  # threads share the generators, so the states are taken from one thread
        ranks = InMemoryRanks(1)
        checkpoint = one_at_a_time(0, ranks.coordinator(0))
        random.seed(7)
        torch.manual_seed(7)
        checkpoint.save(State({"x": torch.ones(2)}))
        expected = (random.random(), torch.rand(1).item())
        checkpoint.load(State({"x": torch.zeros(2)}))
        assert (random.random(), torch.rand(1).item()) == expected

    def work(rank, coordinator):
        result = one_at_a_time(rank, coordinator).load(State({"x": torch.zeros(2)}))
        with lock:
            seen[rank] = result.random_state.value

    on_ranks(2, work)
    assert seen == {0: "derived", 1: "derived"}


def test_mismatches_are_collected_from_all_ranks():
    store = MemoryStore()
    save(store, 1, {"x": torch.ones(2), "y": torch.ones(2)})

    def work(rank, coordinator):
        tensors = {"x": torch.zeros(2)} if rank == 0 else {"x": torch.zeros(2), "z": torch.ones(1)}
        return DistributedCheckpoint(coordinator, store, timeout=30).load(State(tensors))

    errors = on_ranks(2, work)
    for error in errors:
        assert "missing in the checkpoint: model/z" in str(error)
        assert "not in the model: model/y" in str(error)
