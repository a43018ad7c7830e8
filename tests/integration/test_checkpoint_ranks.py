"""Several ranks save and load together: threads here, processes with torch.distributed below."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tensorforge.checkpoint import (
    CheckpointError,
    CheckpointErrorType,
    CheckpointFormat,
    CompressionLevel,
    DistributedCheckpoint,
    InMemoryRanks,
    LoadOptions,
    SaveOptions,
    ShardingSpec,
    SingleProcess,
    TensorShard,
)
from tensorforge.checkpoint.parallel import Deadline
from tensorforge.storage.local_store import LocalStore
from tensorforge.storage.memory_store import MemoryStore

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")

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


def test_a_state_that_ranks_disagree_about_is_refused_on_all_of_them():
    store = MemoryStore()

    def work(rank, coordinator):
        checkpoint = DistributedCheckpoint(coordinator, store, timeout=30)
        return checkpoint.save(State({"x": torch.ones(2 + rank)}))

    errors = on_ranks(3, work)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert all("tensor 'model/x' is F32" in str(error) for error in errors)
    assert list(store.list()) == []


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_fails_fails_the_others_at_once_and_names_itself(tmp_path, victim):
    store, tensors = LocalStore(tmp_path), make_tensors()
    save(store, 3, tensors, checkpoint_prefix="good")

    def work(rank, coordinator):
        checkpoint = DistributedCheckpoint(coordinator, store, timeout=60)

        def progress(done, total):
            if rank == victim:
                raise RuntimeError("disk on fire")

        return checkpoint.save(State(make_tensors(1), rank, 3), progress=progress)

    started = time.monotonic()
    errors = on_ranks(3, work)
    assert time.monotonic() - started < 30
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert all(f"rank {victim}: " in str(error) for error in errors)
    assert all("disk on fire" in str(error) for error in errors)
    assert {blob.key.split("/")[0].split(".")[0] for blob in store.list()} == {"good"}
    assert same(load(store, 2, tensors)[1], tensors)
    store.close()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_never_comes_fails_the_others_within_the_timeout(tmp_path, victim):
    store, tensors = LocalStore(tmp_path), make_tensors()
    save(store, 2, tensors, checkpoint_prefix="good")

    def work(rank, coordinator):
        if rank == victim:
            return None
        checkpoint = DistributedCheckpoint(coordinator, store)
        return checkpoint.save(State(tensors, rank, 2), options=SaveOptions(timeout=0.5))

    error = on_ranks(2, work)[1 - victim]
    assert isinstance(error, CheckpointError)
    assert error.type is CheckpointErrorType.TIMEOUT
    assert f"rank {victim} sent no message in time" in str(error)
    assert same(load(store, 2, tensors)[1], tensors)
    store.close()


def test_a_rank_that_dies_after_the_plan_leaves_a_claim_that_is_swept_when_it_expires(tmp_path):
    store, tensors = LocalStore(tmp_path), make_tensors()

    def work(rank, coordinator):
        checkpoint = DistributedCheckpoint(coordinator, store)
        options = SaveOptions(timeout=4, checkpoint_prefix="half")
        if rank == 1:
            saver = checkpoint._saver
            capture = checkpoint._capturing(State(tensors, rank, 2), None, options)
            saver.plan(capture, options, Deadline(4))
            return None
        return checkpoint.save(State(tensors, rank, 2), options=options)

    error = on_ranks(2, work)[0]
    assert error.type is CheckpointErrorType.TIMEOUT
    assert [blob.key for blob in store.list()] == ["half.saving.json"]
    store.close()


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
