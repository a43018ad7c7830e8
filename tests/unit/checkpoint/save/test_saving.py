import pytest
import torch
from tests.unit.checkpoint.models import OneTensor
from tests.unit.checkpoint.thread_ranks import State, load, make_tensors, on_ranks, same, save

from tensorforge.checkpoint import (
    CheckpointError,
    CheckpointFormat,
    DistributedCheckpoint,
    SaveOptions,
    SingleProcess,
    TensorShard,
)
from tensorforge.storage.local_store import LocalStore
from tensorforge.storage.memory_store import MemoryStore

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")


def test_replicated_tensors_are_written_once_and_spread_over_the_ranks(tmp_path):
    store = LocalStore(tmp_path)
    tensors = {"a": torch.randn(1000, 1000), "b": torch.randn(100), "c": torch.randn(100)}
    save(store, 4, tensors, include_rng_state=False)
    sizes = [blob.size for blob in store.list() if blob.key.endswith(".safetensors")]
    assert len(sizes) == 4
    assert sum(sizes) < 1.02 * sum(tensor.nbytes for tensor in tensors.values())
    assert max(sizes) < 1.1 * min(sizes)
    store.close()


def test_several_ranks_save_in_the_background(tmp_path):
    store, tensors = LocalStore(tmp_path), make_tensors()
    for layout in CheckpointFormat:

        def work(rank, coordinator, layout=layout):
            checkpoint = DistributedCheckpoint(coordinator, store, timeout=30)
            state = State({name: tensor.clone() for name, tensor in tensors.items()}, rank, 3)
            handle = checkpoint.async_save(state, options=SaveOptions(format=layout))
            for value in state.tensors.values():
                (value.tensor if isinstance(value, TensorShard) else value).zero_()
            return handle.result()

        assert len({str(prefix) for prefix in on_ranks(3, work)}) == 1
        results, loaded = load(store, 2, tensors)
        assert results[0].manifest.format == layout.value
        assert same(loaded, tensors)
    store.close()


def test_ranks_with_tensors_of_their_own_are_united():
    store = MemoryStore()

    def work(rank, coordinator):
        checkpoint = DistributedCheckpoint(coordinator, store, timeout=30)
        return checkpoint.save(State({f"stage-{rank}": torch.full((3,), float(rank))}))

    on_ranks(3, work)
    together = State({f"stage-{rank}": torch.zeros(3) for rank in range(3)})
    DistributedCheckpoint(SingleProcess(), store).load(together)
    assert [together.tensors[f"stage-{rank}"][0] for rank in range(3)] == [0, 1, 2]


def test_a_state_that_ranks_disagree_about_is_refused_on_all_of_them():
    store = MemoryStore()

    def work(rank, coordinator):
        checkpoint = DistributedCheckpoint(coordinator, store, timeout=30)
        return checkpoint.save(State({"x": torch.ones(2 + rank)}))

    errors = on_ranks(3, work)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert all("tensor 'model/x' is F32" in str(error) for error in errors)
    assert list(store.list()) == []


def test_the_store_is_not_listed_at_every_save():
    class Counting(MemoryStore):
        listed = 0

        def list(self, prefix=""):
            self.listed += 1
            return super().list(prefix)

    store = Counting()
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    checkpoint.save(OneTensor(1, 10))
    first = store.listed
    assert first
    checkpoint.save(OneTensor(2, 10))
    assert store.listed == first
    DistributedCheckpoint(SingleProcess(), store).save(OneTensor(4, 10))
    assert store.listed > first
