import errno
import os
import subprocess
import threading
import time

import pytest
from tests.unit.checkpoint.models import OneTensor

from tensorforge.checkpoint import (
    CheckpointError,
    CheckpointErrorType,
    CheckpointFormat,
    DistributedCheckpoint,
    LoadOptions,
    SaveOptions,
    SingleProcess,
)
from tensorforge.storage.local_store import LocalStore
from tensorforge.storage.memory_store import MemoryStore
from tensorforge.storage.system_calls import SystemCalls


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def check_refused(folder, system, kind, message):
    with DistributedCheckpoint(SingleProcess(), LocalStore(folder)) as checkpoint:
        checkpoint.save(OneTensor(1), options=SaveOptions(checkpoint_prefix="good"))
    before = files(folder)
    for layout in CheckpointFormat:
        with DistributedCheckpoint(
            SingleProcess(), LocalStore(folder, system=system)
        ) as checkpoint:
            with pytest.raises(CheckpointError, match=message) as caught:
                checkpoint.save(OneTensor(2), options=SaveOptions(format=layout, timeout=20))
            assert caught.value.type is kind
            state = OneTensor()
            checkpoint.load(state)
            assert state.tensors["x"][0] == 1
    assert files(folder) == before


class Full(SystemCalls):
    """A disk with room for so many more bytes."""

    def __init__(self, room):
        self.room = room

    def _take(self, count):
        if count > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= count

    def write(self, file, data):
        self._take(len(data))
        return super().write(file, data)

    def write_at(self, file, data, offset):
        self._take(len(data))
        return super().write_at(file, data, offset)


@pytest.mark.parametrize("room", [0, 100, 1_000_000])
def test_a_disk_that_fills_up_is_a_storage_error(tmp_path, room):
    check_refused(tmp_path, Full(room), CheckpointErrorType.STORAGE_ERROR, "no room on the disk")


def test_a_disk_that_is_really_full_is_a_storage_error(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs privileges")
    try:
        check_refused(folder, None, CheckpointErrorType.STORAGE_ERROR, "no room on the disk")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_folder_is_a_storage_error(tmp_path):
    class ReadOnly(SystemCalls):
        def create(self, name, flags, folder):
            raise OSError(errno.EROFS, "Read-only file system")

    check_refused(tmp_path, ReadOnly(), CheckpointErrorType.STORAGE_ERROR, "Read-only file system")


def test_a_disk_that_hangs_is_interrupted_by_the_timeout(tmp_path):
    released = threading.Event()

    class Hanging(SystemCalls):
        def write_at(self, file, data, offset):
            released.wait(60)
            return super().write_at(file, data, offset)

    store = LocalStore(tmp_path, system=Hanging())
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    started = time.monotonic()
    try:
        with pytest.raises(CheckpointError, match=r"took longer than 0\.3 seconds") as caught:
            checkpoint.save(OneTensor(), options=SaveOptions(timeout=0.3))
    finally:
        released.set()
    assert time.monotonic() - started < 30
    assert caught.value.type is CheckpointErrorType.TIMEOUT
    assert files(tmp_path) == []
    checkpoint.close()


def test_a_load_that_hangs_is_interrupted_by_the_timeout():
    released = threading.Event()

    class Hanging(MemoryStore):
        slow = False

        def read_into(self, key, offset, buffer):
            if self.slow:
                released.wait(60)
            super().read_into(key, offset, buffer)

    store = Hanging()
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    checkpoint.save(OneTensor())
    store.slow = True
    options = LoadOptions(timeout=0.3, skip_validation=True)
    try:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(OneTensor(), options=options)
    finally:
        released.set()
    assert caught.value.type is CheckpointErrorType.TIMEOUT


def test_a_folder_without_permission_is_refused_by_name(tmp_path):
    if os.geteuid() == 0:
        (tmp_path / "file").write_text("in the way")
        folder = tmp_path / "file" / "inside"
    else:
        folder = tmp_path / "locked"
        folder.mkdir(mode=0o500)
    checkpoint = DistributedCheckpoint(SingleProcess(), LocalStore(folder))
    with checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.save(OneTensor())
    assert caught.value.type in (
        CheckpointErrorType.STORAGE_ERROR,
        CheckpointErrorType.SAVE_FAILED,
    )
