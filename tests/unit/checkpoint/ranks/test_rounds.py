import time

import pytest
from tests.unit.checkpoint.thread_ranks import State, load, make_tensors, on_ranks, same, save

from tensorforge.checkpoint import (
    CheckpointError,
    CheckpointErrorType,
    DistributedCheckpoint,
    SaveOptions,
)
from tensorforge.checkpoint.parallel import Deadline
from tensorforge.storage.local_store import LocalStore

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")


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
