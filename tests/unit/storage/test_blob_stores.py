"""What every store promises, on the two that need no server."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tensorforge.errors import (
    AlreadyExistsError,
    ClosedError,
    EncodingError,
    InvalidInputError,
    NotFoundError,
)
from tensorforge.storage.blobs import validate_key
from tensorforge.storage.local_store import LocalStore
from tensorforge.storage.memory_store import MemoryStore
from tensorforge.storage.opening import open_store


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    made = LocalStore(tmp_path / "blobs") if request.param == "local" else MemoryStore("test")
    yield made
    made.close()


def test_what_was_written_is_read(store):
    info = store.write("a/b.bin", [b"hello ", memoryview(b"world")])
    assert store.read("a/b.bin") == b"hello world"
    assert store.stat("a/b.bin") == info
    assert (info.key, info.size) == ("a/b.bin", 11)
    assert info.modified_at.tzinfo is not None


def test_writing_again_replaces(store):
    store.write("a", b"old and longer")
    store.write("a", b"new")
    assert store.read("a") == b"new"


def test_creating_has_one_winner(store):
    barrier = threading.Barrier(8)

    def create(index):
        barrier.wait()
        try:
            store.create("folder/commit", b"%d" % index)
            return index
        except AlreadyExistsError:
            return None

    with ThreadPoolExecutor(8) as pool:
        winners = [index for index in pool.map(create, range(8)) if index is not None]
    assert len(winners) == 1
    assert store.read("folder/commit") == b"%d" % winners[0]


def test_a_range_is_read_exactly(store):
    store.write("a", bytes(range(256)) * 1000)
    target = bytearray(100)
    store.read_into("a", 300, memoryview(target))
    assert target == bytes(range(44, 144))


def test_a_range_past_the_end_is_refused_by_name(store):
    store.write("short", b"12345")
    with pytest.raises(EncodingError, match="short has 5 bytes, but 8 are needed"):
        store.read_into("short", 4, memoryview(bytearray(4)))
    with pytest.raises(InvalidInputError, match="negative"):
        store.read_into("short", -1, memoryview(bytearray(1)))


def test_what_is_not_there_is_not_found(store):
    for ask in (store.read, store.stat):
        with pytest.raises(NotFoundError):
            ask("no/such")
    with pytest.raises(NotFoundError):
        store.read_into("no/such", 0, memoryview(bytearray(1)))
    store.delete("no/such")


def test_listing_is_sorted_by_key_and_filtered_by_prefix(store):
    for key in ("b", "a/c", "a.d", "a/b/c", "ab"):
        store.write(key, key.encode())
    assert [info.key for info in store.list()] == ["a.d", "a/b/c", "a/c", "ab", "b"]
    assert [info.key for info in store.list("a/")] == ["a/b/c", "a/c"]
    assert [info.key for info in store.list("a/b")] == ["a/b/c"]
    assert list(store.list("z")) == []


def test_a_deleted_blob_is_gone(store):
    store.write("a/b", b"x")
    store.delete("a/b")
    assert list(store.list()) == []
    store.write("a", b"the folder is no longer in the way")


def test_a_writer_shows_nothing_before_its_commit(store):
    with store.open_writer("a", size_hint=6) as writer:
        writer.append(b"one")
        assert list(store.list()) == []
        writer.append(b"two")
        assert writer.commit().size == 6
    assert store.read("a") == b"onetwo"
    with pytest.raises(ClosedError):
        writer.append(b"late")


def test_a_writer_whose_block_raises_leaves_nothing(store):
    with pytest.raises(RuntimeError), store.open_writer("a") as writer:
        writer.append(b"half")
        raise RuntimeError("crash")
    assert list(store.list()) == []
    assert store.sweep() == 0


@pytest.mark.parametrize(
    "key",
    [
        *("", "/etc/passwd", "..", "a/../b", "a//b", "a/", "./a", "a\0b", "a\nb", ".staging/x"),
        *("x" * 256, "a/" * 600 + "a", "\ud800"),
    ],
)
def test_a_key_that_could_lead_outside_is_refused(store, key):
    for use in (store.read, store.delete, store.stat, store.open_writer):
        with pytest.raises(InvalidInputError, match="is not a valid key"):
            use(key)
    with pytest.raises(InvalidInputError):
        store.write(key, b"")


def test_ordinary_keys_are_allowed():
    for key in ("a", "a/b-1_2.json", "...", "a/..b", "größe/ж", "a b"):
        assert validate_key(key) == key


def test_a_store_is_opened_by_path_or_url(tmp_path):
    for address in (tmp_path / "x y", str(tmp_path / "x y"), (tmp_path / "x y").as_uri()):
        store = open_store(address)
        assert store.url == (tmp_path / "x y").as_uri()
        store.close()
    assert open_store("memory://one") is open_store("memory://one")
    assert open_store("memory://one") is not open_store("memory://two")
    with pytest.raises(InvalidInputError, match="no store is opened by 'ftp'"):
        open_store("ftp://host/x")
    with pytest.raises(InvalidInputError, match="absolute/path"):
        open_store("file://host/x")
