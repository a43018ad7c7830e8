"""Files that the system will not read, and files that are none: they cost their own checkpoint at most."""

import errno
import os

import pytest
import torch

from tensorforge.checkpoint import (
    CheckpointError,
    CheckpointFallbackWarning,
    DistributedCheckpoint,
    SaveOptions,
    SingleProcess,
)
from tensorforge.checkpoint.store_index import list_checkpoints
from tensorforge.storage.local_store import LocalStore
from tensorforge.storage.system_calls import translate


class State:
    def __init__(self, value):
        self.tensors = {"x": torch.full((100,), float(value))}

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        self.tensors = state


class BadManifests(LocalStore):
    """A folder in which the named manifests fail with an error of the system."""

    def __init__(self, folder, number, *names):
        super().__init__(folder)
        self.number, self.names = number, names

    def read(self, key):
        if key.endswith(".metadata.json") and key.startswith(self.names):
            error = OSError(self.number, os.strerror(self.number))
            raise translate(error, key) from error
        return super().read(key)


@pytest.fixture
def folder(tmp_path):
    for value in (1, 2, 3):
        with DistributedCheckpoint(SingleProcess(), LocalStore(tmp_path)) as checkpoint:
            checkpoint.save(State(value), options=SaveOptions(checkpoint_prefix=f"step-{value}"))
    return tmp_path


def load(store):
    state = State(0)
    with DistributedCheckpoint(SingleProcess(), store) as checkpoint:
        checkpoint.load(state)
    return int(state.tensors["x"][0])


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_an_old_manifest_that_cannot_be_read_is_not_needed(folder, number):
    assert load(BadManifests(folder, number, "step-1")) == 3
    assert len(list_checkpoints(BadManifests(folder, number, "step-1"))) == 2


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_the_newest_manifest_that_cannot_be_read_falls_back(folder, number):
    with pytest.warns(CheckpointFallbackWarning):
        assert load(BadManifests(folder, number, "step-3")) == 2


def test_a_store_that_cannot_be_reached_is_no_damaged_checkpoint(folder):
    with pytest.raises(CheckpointError, match="Connection timed out"):
        load(BadManifests(folder, errno.ETIMEDOUT, "step-3"))


def test_pipes_and_links_in_the_folder_are_skipped_without_waiting(folder):
    os.mkfifo(folder / "pipe.metadata.json")
    (folder / "link.metadata.json").symlink_to(folder / "pipe.metadata.json")
    assert load(LocalStore(folder)) == 3
    assert len(list_checkpoints(LocalStore(folder))) == 3
