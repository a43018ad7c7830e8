import errno
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tensorforge.errors import (
    AlreadyExistsError,
    CapacityError,
    ClosedError,
    ConflictError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
)
from tensorforge.storage.local_store import LocalStore
from tensorforge.storage.range_reader import is_cached
from tensorforge.storage.system_calls import SystemCalls


@pytest.fixture
def store(tmp_path):
    made = LocalStore(tmp_path / "blobs")
    yield made
    made.close()


class Recording(SystemCalls):
    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if not name.startswith("_") and name != "calls":
            self.calls.append(name)
        return super().__getattribute__(name)


class FullDisk(SystemCalls):
    def write(self, file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_at = write


def test_bytes_are_synced_before_they_get_their_name_and_the_folder_after(tmp_path):
    system = Recording()
    store = LocalStore(tmp_path, system=system)
    store.write("a", b"1")
    assert system.calls[-4:] == ["write", "sync", "replace", "sync"]
    store.create("b", b"1")
    assert system.calls[-5:] == ["write", "sync", "link", "unlink", "sync"]
    store.close()


def test_links_that_lead_outside_are_not_followed(store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    store.write("ok", b"1")
    (store.root / "folder").symlink_to(outside)
    (store.root / "file").symlink_to(outside / "secret")
    for key in ("folder/secret", "file"):
        with pytest.raises((PermissionDeniedError, ConflictError)):
            store.read(key)
    with pytest.raises((PermissionDeniedError, ConflictError)):
        store.write("folder/new", b"1")
    assert [info.key for info in store.list()] == ["ok"]
    store.delete("folder/secret")
    assert (outside / "secret").exists()
    store.write("file", b"replaces the link, not what it points to")
    assert (outside / "secret").read_text() == "secret"


def test_a_key_cannot_be_the_folder_of_another(store):
    store.write("a", b"1")
    with pytest.raises(ConflictError, match="folder of another"):
        store.write("a/b", b"1")
    store.write("c/d", b"1")
    with pytest.raises(ConflictError):
        store.write("c", b"1")
    with pytest.raises(NotFoundError):
        store.read("c")
    store.delete("c")
    assert store.sweep() == 0
    assert [info.key for info in store.list()] == ["a", "c/d"]


def test_a_full_disk_is_a_capacity_error_and_leaves_nothing(tmp_path):
    store = LocalStore(tmp_path, system=FullDisk())
    with pytest.raises(CapacityError, match="a/b: no room on the disk"):
        store.write("a/b", b"1")
    assert list(store.list()) == []
    assert list((tmp_path / ".staging").iterdir()) == []
    store.close()


def test_room_that_is_not_there_is_found_out_before_writing(store):
    with pytest.raises(CapacityError):
        store.open_positional("huge", 1 << 60)
    assert list((store.root / ".staging").iterdir()) == []


def test_a_closed_store_says_so(store):
    store.write("a", b"1")
    store.close()
    store.close()
    for use in (store.read, store.open_writer, store.delete):
        with pytest.raises(ClosedError):
            use("a")


@pytest.mark.parametrize("direct", [True, False])
def test_parts_written_in_any_order_make_one_blob(tmp_path, direct):
    store = LocalStore(tmp_path, direct=direct)
    writer = store.open_positional("a", 10_000)
    buffer = memoryview(mmap.mmap(-1, 8192))
    buffer[:] = b"b" * 8192
    writer.write_at(4096, buffer)
    buffer[:] = b"a" * 8192
    writer.write_at(0, buffer[:4096])
    assert writer.commit(10_000).size == 10_000
    assert store.read("a") == b"a" * 4096 + b"b" * 5904
    with pytest.raises(AlreadyExistsError), store.open_positional("a", 1) as second:
        second.commit(1)
    assert list((tmp_path / ".staging").iterdir()) == []
    store.close()


def test_unaligned_direct_writes_are_refused(store):
    writer = store.open_positional("a", 4096)
    if writer.alignment > 1:
        with pytest.raises(InvalidInputError, match="not aligned"):
            writer.write_at(1, memoryview(bytearray(4096)))
    writer.abort()


def test_a_file_system_without_direct_writing_is_written_through_the_cache(tmp_path):
    class NoDirect(SystemCalls):
        def create(self, name, flags, folder):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return super().create(name, flags, folder)

    store = LocalStore(tmp_path, system=NoDirect())
    writer = store.open_positional("a", 3)
    assert writer.alignment == 1
    writer.write_at(0, memoryview(b"abc"))
    writer.commit(3)
    assert store.read("a") == b"abc"
    store.close()


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 100_001])
def test_a_cold_range_is_read_past_the_cache(store, offset):
    content = os.urandom(9 << 20)
    store.write("a", content)
    with (store.root / "a").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    target = bytearray((5 << 20) + 3)
    store.read_into("a", offset, memoryview(target))
    assert target == content[offset : offset + len(target)]


def test_the_litter_of_a_killed_writer_is_swept_and_a_living_ones_file_is_not(store):
    script = (
        "import sys, time\n"
        "from tensorforge.storage.local_store import LocalStore\n"
        "writer = LocalStore(sys.argv[1]).open_writer('a')\n"
        "writer.append(b'half')\n"
        "print('writing', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(store.root)], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"writing\n"
        assert store.sweep() == 0
        child.send_signal(signal.SIGKILL)
        child.wait()
    with store.open_writer("b") as living:
        living.append(b"1")
        assert store.sweep() == 1
        living.commit()
    assert [info.key for info in store.list()] == ["b"]


def test_a_folder_that_may_not_be_written_is_a_clear_error(tmp_path):
    class ReadOnly(SystemCalls):
        def make_folder(self, name, folder):
            raise OSError(errno.EROFS, "Read-only file system")

    store = LocalStore(tmp_path, system=ReadOnly())
    with pytest.raises(PermissionDeniedError, match="Read-only file system"):
        store.write("a", b"1")
    store.close()


def test_folders_that_a_deletion_leaves_empty_go_with_it(store):
    store.write("a/b/c", b"1")
    store.write("a/d", b"1")
    store.delete("a/b/c")
    assert not Path(store.root / "a" / "b").exists()
    assert Path(store.root / "a").exists()


def _leave_cache(path):
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("state", ["cold", "warm", "partly", "unknown"])
def test_a_range_is_read_right_whatever_of_it_lies_in_the_page_cache(
    store, tmp_path, monkeypatch, state
):
    content = os.urandom((3 << 20) + 777)
    store.write("a", content)
    if state != "warm":
        _leave_cache(tmp_path / "blobs" / "a")
    if state == "partly":
        with (tmp_path / "blobs" / "a").open("rb") as file:
            file.read(1 << 20)
    if state == "unknown":
        monkeypatch.setattr("tensorforge.storage.local_store.is_cached", lambda *_: None)
    for offset, length in ((0, len(content)), (4097, 2 << 20), (len(content) - 100_001, 100_001)):
        buffer = bytearray(length)
        store.read_into("a", offset, memoryview(buffer))
        assert buffer == content[offset : offset + length]


def test_reading_past_the_page_cache_leaves_it_as_it_is(store, tmp_path):
    store.write("a", os.urandom(4 << 20))
    path = tmp_path / "blobs" / "a"
    _leave_cache(path)
    with path.open("rb") as file:
        if is_cached(file.fileno(), 0, 4 << 20) is not False:
            pytest.skip("this system does not tell, or this file system lives in the cache")
        store.read_into("a", 0, memoryview(bytearray(4 << 20)))
        assert is_cached(file.fileno(), 0, 4 << 20) is False
        file.read()
        assert is_cached(file.fileno(), 0, 4 << 20) is True
