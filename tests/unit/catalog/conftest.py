import pytest

from tensorforge.catalog import (
    CheckpointManager,
    GcPolicy,
    IncrementPolicy,
    RunCheckpoints,
    remover,
)
from tensorforge.checkpoint import DistributedCheckpoint, SingleProcess
from tensorforge.storage.local_store import LocalStore


@pytest.fixture
def store(tmp_path):
    made = LocalStore(tmp_path / "blobs")
    yield made
    made.close()


@pytest.fixture
def manager(store, tmp_path):
    policy = GcPolicy(max_checkpoints_per_run=2)
    with CheckpointManager(policy, database=tmp_path / "c.db", remove_files=remover(store)) as made:
        yield made


@pytest.fixture
def runs(manager, store):
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    with RunCheckpoints(
        manager, checkpoint, "a run/1", increments=IncrementPolicy(max_chain=4)
    ) as made:
        yield made
