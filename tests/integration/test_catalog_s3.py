"""Recorded checkpoints on a real S3 server, and on one that dies in the middle of a save."""

import pytest
import torch
from tests.store_files import orphans

from tensorforge.catalog import (
    CheckpointManager,
    IncrementPolicy,
    RestoreCriteria,
    RunCheckpoints,
    rebuild,
    remover,
)
from tensorforge.checkpoint import (
    CheckpointErrorType,
    DistributedCheckpoint,
    FaultToleranceHandler,
    RetryPolicy,
    SingleProcess,
)
from tensorforge.errors import CheckpointError
from tensorforge.testing.s3 import running_s3


class State(dict):
    def state_dict(self):
        return dict(self)

    def load_state_dict(self, state):
        for name, tensor in state.items():
            self[name].copy_(tensor)


def make_runs(manager, store):
    faults = FaultToleranceHandler(store, RetryPolicy(max_attempts=1))
    checkpoint = DistributedCheckpoint(SingleProcess(), store, faults)
    return RunCheckpoints(manager, checkpoint, "run", increments=IncrementPolicy())


def test_a_chain_on_s3_is_restored_exactly_from_every_link(s3_server):
    with s3_server.store() as store, CheckpointManager(remove_files=remover(store)) as manager:
        runs = make_runs(manager, store)
        state = State(w=torch.randn(1000, 1000), b=torch.zeros(10))
        saved = []
        for step in range(3):
            state["b"] += 1
            state["w"][step] *= 0.5
            runs.save(state, epoch=0, step=step)
            saved.append({name: tensor.clone() for name, tensor in state.items()})
        for step, expected in enumerate(saved):
            found = State(w=torch.empty(1000, 1000), b=torch.empty(10))
            runs.restore(found, criteria=RestoreCriteria(training_run_id="run", max_step=step))
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert orphans(store) == []
        assert manager.total_size() == sum(blob.size for blob in store.list())
        with CheckpointManager() as again:
            assert len(rebuild(again, store).adopted) == 3


def test_a_server_that_dies_in_a_save_costs_that_save_and_nothing_else():
    with (
        running_s3() as server,
        server.store("ckpt", retry_seconds=0.3) as store,
        CheckpointManager(remove_files=remover(store)) as manager,
    ):
        runs = make_runs(manager, store)
        state = State(w=torch.arange(8_000_000.0))
        first = runs.save(state, epoch=0, step=0)
        before = {name: tensor.clone() for name, tensor in state.items()}
        state["w"].mul_(1.1)
        progress = []

        def kill(done, total):
            if not progress:
                server.kill()
            progress.append((done, total))

        with pytest.raises(CheckpointError) as failure:
            runs.save(state, epoch=0, step=1, progress=kill)
        assert failure.value.type is CheckpointErrorType.STORAGE_ERROR
        assert progress
        server.restart()
        manager.gc()
        assert [r.checkpoint_id for r in manager.list_for_run("run")] == [first.checkpoint_id]
        assert orphans(store) == []
        found = State(w=torch.empty(8_000_000))
        assert runs.restore(found).record == first
        assert torch.equal(found["w"], before["w"])
        assert runs.save(state, epoch=0, step=1).parent_id == first.checkpoint_id
