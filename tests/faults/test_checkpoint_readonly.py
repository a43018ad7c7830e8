"""Folders that really cannot be written to: a clear error, the old checkpoint still loads, no litter."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

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
from tensorforge.storage.local_store import LocalStore

NOBODY = 65534


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


def test_a_folder_of_somebody_else_is_a_storage_error():
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    # Not below pytest's own folder, which others may not enter.
    folder = Path(tempfile.mkdtemp(prefix="tensorforge-test-", dir="/var/tmp"))
    try:
        store = folder / "store"
        folder.chmod(0o755)
        save(store, 1, "good")
        command = [sys.executable, __file__, str(store)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert "refused" in done.stdout
        assert newest(store) == 1
    finally:
        shutil.rmtree(folder)


def as_somebody_else(folder):
    """In a process of its own, which cannot go back."""
    with tempfile.TemporaryDirectory() as place:
        save(Path(place), 0, "warm-up")  # everything is imported while it still can be
        newest(Path(place))
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    check_refused(folder, "the system forbids it")
    print("refused")


if __name__ == "__main__":
    as_somebody_else(Path(sys.argv[1]))
