"""Full disks, forbidden folders, hanging disks: a clear error, the old checkpoint intact, no litter."""

import errno
import os
import subprocess
import threading
import time

import pytest
import torch

from tensorforge.checkpoint import (
    CheckpointError,
    CheckpointErrorType,
    CheckpointFormat,
    DistributedCheckpoint,
    FaultToleranceHandler,
    LoadOptions,
    RetryPolicy,
    SaveOptions,
    SingleProcess,
)
from tensorforge.errors import UnavailableError
from tensorforge.storage.local_store import LocalStore
from tensorforge.storage.memory_store import MemoryStore
from tensorforge.storage.system_calls import SystemCalls


class State:
    def __init__(self, value=0.0, size=1_000_000):
        self.tensors = {"x": torch.full((size,), float(value))}

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        self.tensors = state


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def check_refused(folder, system, kind, message):
    with DistributedCheckpoint(SingleProcess(), LocalStore(folder)) as checkpoint:
        checkpoint.save(State(1), options=SaveOptions(checkpoint_prefix="good"))
    before = files(folder)
    for layout in CheckpointFormat:
        with DistributedCheckpoint(
            SingleProcess(), LocalStore(folder, system=system)
        ) as checkpoint:
            with pytest.raises(CheckpointError, match=message) as caught:
                checkpoint.save(State(2), options=SaveOptions(format=layout, timeout=20))
            assert caught.value.type is kind
            state = State()
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
            checkpoint.save(State(), options=SaveOptions(timeout=0.3))
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
    checkpoint.save(State())
    store.slow = True
    options = LoadOptions(timeout=0.3, skip_validation=True)
    try:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(State(), options=options)
    finally:
        released.set()
    assert caught.value.type is CheckpointErrorType.TIMEOUT


class Flaky(MemoryStore):
    """Fails so many times at each operation, after doing it: the answer got lost."""

    def __init__(self, failures):
        super().__init__()
        self.failures = failures
        self.failed = {}

    def _maybe_fail(self, operation):
        self.failed[operation] = self.failed.get(operation, 0) + 1
        if self.failed[operation] <= self.failures:
            raise UnavailableError(f"the answer to {operation} got lost")

    def create(self, key, data):
        done = super().create(key, data)
        if key.endswith(".metadata.json"):
            self._maybe_fail("commit")
        return done

    def read_into(self, key, offset, buffer):
        self._maybe_fail("read")
        super().read_into(key, offset, buffer)

    def open_writer(self, key, size_hint=None):
        self._maybe_fail("write")
        return super().open_writer(key, size_hint)


def test_what_may_be_repeated_is_repeated_even_if_an_answer_got_lost():
    store = Flaky(2)
    faults = FaultToleranceHandler(store, RetryPolicy(base_delay=0, max_delay=0))
    checkpoint = DistributedCheckpoint(SingleProcess(), store, faults)
    checkpoint.save(State(7))
    state = State()
    checkpoint.load(state)
    assert state.tensors["x"][0] == 7
    assert store.failed["commit"] == 1, "the second attempt found its own manifest there"


def test_giving_up_leaves_nothing():
    store = Flaky(99)
    faults = FaultToleranceHandler(store, RetryPolicy(max_attempts=2, base_delay=0, max_delay=0))
    checkpoint = DistributedCheckpoint(SingleProcess(), store, faults)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(State(7))
    assert caught.value.type is CheckpointErrorType.STORAGE_ERROR
    assert list(store.list()) == []


def test_a_folder_without_permission_is_refused_by_name(tmp_path):
    if os.geteuid() == 0:
        (tmp_path / "file").write_text("in the way")
        folder = tmp_path / "file" / "inside"
    else:
        folder = tmp_path / "locked"
        folder.mkdir(mode=0o500)
    checkpoint = DistributedCheckpoint(SingleProcess(), LocalStore(folder))
    with checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.save(State())
    assert caught.value.type in (
        CheckpointErrorType.STORAGE_ERROR,
        CheckpointErrorType.SAVE_FAILED,
    )


def test_the_store_is_not_listed_at_every_save():
    class Counting(MemoryStore):
        listed = 0

        def list(self, prefix=""):
            self.listed += 1
            return super().list(prefix)

    store = Counting()
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    checkpoint.save(State(1, 10))
    first = store.listed
    assert first
    checkpoint.save(State(2, 10))
    assert store.listed == first
    DistributedCheckpoint(SingleProcess(), store).save(State(4, 10))
    assert store.listed > first
