"""Folders that really cannot be written to: a clear error, the old checkpoint still loads, no litter."""

import subprocess

import pytest
import torch

from tensorforge.checkpoint import (
    CheckpointError,
    CheckpointErrorType,
    CheckpointFormat,
    DistributedCheckpoint,
    SaveOptions,
    SingleProcess,
)
from tensorforge.storage.local import LocalStore


class State:
    def __init__(self, value):
        self.tensors = {"x": torch.full((1000,), float(value))}

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        self.tensors = state


def save(folder, value, prefix, layout=CheckpointFormat.MULTI_SHARD):
    with DistributedCheckpoint(SingleProcess(), LocalStore(folder)) as checkpoint:
        options = SaveOptions(checkpoint_prefix=prefix, format=layout, timeout=20)
        return checkpoint.save(State(value), options=options)


def newest(folder):
    state = State(0)
    with DistributedCheckpoint(SingleProcess(), LocalStore(folder)) as checkpoint:
        checkpoint.load(state)
    return state.tensors["x"][0]


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def check_refused(folder, message):
    before = files(folder)
    for layout in CheckpointFormat:
        with pytest.raises(CheckpointError, match=message) as caught:
            save(folder, 2, "new", layout)
        assert caught.value.type is CheckpointErrorType.STORAGE_ERROR
        assert newest(folder) == 1
    assert files(folder) == before


def test_a_file_system_that_is_mounted_read_only_is_a_storage_error(tmp_path):
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs privileges")
    try:
        save(folder, 1, "good")
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        check_refused(folder, "Read-only file system")
        check_refused(folder / ".", "the system forbids it")
    finally:
        subprocess.run(["umount", str(folder)], check=True)
