"""The conformance tests of blob stores: subclass `BlobStoreConformance` and give it a `store` fixture.

class TestMyStore(BlobStoreConformance):
    @pytest.fixture
    def store(self):
        ...
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from tensorforge.errors import (
    AlreadyExistsError,
    ClosedError,
    EncodingError,
    InvalidInputError,
    NotFoundError,
)
from tensorforge.storage.blobs import BlobStore

HOSTILE_KEYS = [
    "",
    "/etc/passwd",
    "..",
    "../outside",
    "a/../../b",
    "a/./b",
    "./a",
    "a//b",
    "a/",
    "a\0b",
    "a\nb",
    ".staging/x",
    "x" * 256,
    "a/" * 600 + "a",
    "\ud800",
]
ODD_KEYS = [
    "a",
    "a/b-1_2.json",
    "...",
    "a/..b",
    "größe/ж",
    "a b",
    "50%",
    "a%20b",
    "x#y?z",
    "p+q=r&s",
]


class BlobStoreConformance:
    """One test for each promise of `BlobStore`."""

    def test_what_was_written_is_read(self, store: BlobStore) -> None:
        info = store.write("a/b.bin", b"hello world")
        assert store.read("a/b.bin") == b"hello world"
        assert (info.key, info.size) == ("a/b.bin", 11)
        assert store.stat("a/b.bin") == info

    def test_a_blob_may_come_in_pieces(self, store: BlobStore) -> None:
        info = store.write("a", (bytes([k]) * k for k in range(5)))
        assert store.read("a") == b"\1\2\2\3\3\3\4\4\4\4"
        assert info.size == 10

    def test_any_flat_buffer_will_do(self, store: BlobStore) -> None:
        for data in (
            b"abcd",
            bytearray(b"abcd"),
            memoryview(b"abcd"),
            memoryview(b"abcd").cast("i"),
        ):
            store.write("a", data)
            assert store.read("a") == b"abcd"

    def test_a_blob_may_be_empty(self, store: BlobStore) -> None:
        assert store.write("empty", b"").size == 0
        assert store.read("empty") == b""
        store.read_into("empty", 0, memoryview(bytearray()))

    def test_a_blob_may_be_larger_than_any_part(self, store: BlobStore) -> None:
        block = bytes(range(256)) * 4096
        with store.open_writer("large", size_hint=20 * len(block)) as writer:
            for _ in range(20):
                writer.append(block)
            assert writer.commit().size == 20 * len(block)
        tail = bytearray(300)
        store.read_into("large", 20 * len(block) - 300, memoryview(tail))
        assert bytes(tail) == block[-300:]
        assert store.read("large") == 20 * block

    def test_writing_again_replaces(self, store: BlobStore) -> None:
        store.write("a", b"the first is longer")
        store.write("a", b"second")
        assert store.read("a") == b"second"

    def test_creating_refuses_a_key_that_is_taken(self, store: BlobStore) -> None:
        store.create("a", b"first")
        with pytest.raises(AlreadyExistsError, match="a"):
            store.create("a", b"first")
        assert store.read("a") == b"first"

    def test_creating_has_one_winner(self, store: BlobStore) -> None:
        barrier = threading.Barrier(16)

        def create(index: int) -> int | None:
            barrier.wait()
            try:
                store.create("folder/commit", b"%d" % index)
            except AlreadyExistsError:
                return None
            return index

        with ThreadPoolExecutor(16) as pool:
            winners = [index for index in pool.map(create, range(16)) if index is not None]
        assert len(winners) == 1
        assert store.read("folder/commit") == b"%d" % winners[0]

    def test_a_deleted_key_can_be_created_again(self, store: BlobStore) -> None:
        store.create("a", b"1")
        store.delete("a")
        store.create("a", b"2")
        assert store.read("a") == b"2"

    def test_a_range_is_read_exactly(self, store: BlobStore) -> None:
        store.write("a", bytes(range(256)) * 1000)
        target = bytearray(b"......")
        store.read_into("a", 300, memoryview(target)[1:5])
        assert target == b"." + bytes(range(44, 48)) + b"."

    def test_ranges_are_read_by_many_threads(self, store: BlobStore) -> None:
        content = bytes(range(256)) * 4000
        store.write("a", content)

        def read(offset: int) -> bool:
            target = bytearray(1000)
            store.read_into("a", offset, memoryview(target))
            return bytes(target) == content[offset : offset + 1000]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(0, 1_000_000, 9_973)))

    def test_a_range_past_the_end_is_refused(self, store: BlobStore) -> None:
        store.write("short", b"12345")
        for offset in (4, 5, 500):
            message = f"short has 5 bytes, but {offset + 4} are needed"
            with pytest.raises(EncodingError, match=message):
                store.read_into("short", offset, memoryview(bytearray(4)))

    def test_a_negative_offset_is_refused(self, store: BlobStore) -> None:
        store.write("a", b"12345")
        with pytest.raises(InvalidInputError, match="negative"):
            store.read_into("a", -1, memoryview(bytearray(1)))

    def test_what_is_not_there_is_not_found(self, store: BlobStore) -> None:
        with pytest.raises(NotFoundError, match="no/such"):
            store.read("no/such")
        with pytest.raises(NotFoundError, match="no/such"):
            store.stat("no/such")
        with pytest.raises(NotFoundError, match="no/such"):
            store.read_into("no/such", 0, memoryview(bytearray(1)))

    def test_deleting_what_is_not_there_is_fine(self, store: BlobStore) -> None:
        store.delete("no/such")

    def test_a_deleted_blob_is_gone(self, store: BlobStore) -> None:
        store.write("a/b", b"x")
        store.delete("a/b")
        assert list(store.list()) == []
        with pytest.raises(NotFoundError):
            store.read("a/b")
        store.write("a", b"a key that was the folder of another")

    def test_listing_is_sorted_by_key_and_filtered_by_prefix(self, store: BlobStore) -> None:
        keys = ["b", "a/c", "a.d", "a/b/c", "ab", "a/b-x"]
        for key in keys:
            store.write(key, key.encode())

        def listed(prefix: str) -> list[str]:
            return [info.key for info in store.list(prefix)]

        assert listed("") == sorted(keys)
        assert listed("a/") == ["a/b-x", "a/b/c", "a/c"]
        assert listed("a/b") == ["a/b-x", "a/b/c"]
        assert listed("a/b/c") == ["a/b/c"]
        assert listed("z") == []

    def test_listing_knows_sizes_and_times(self, store: BlobStore) -> None:
        store.write("a", b"123")
        (info,) = store.list()
        assert info == store.stat("a")
        assert abs(datetime.now(UTC) - info.modified_at) < timedelta(hours=1)

    def test_a_writer_shows_nothing_before_its_commit(self, store: BlobStore) -> None:
        with store.open_writer("a", size_hint=6) as writer:
            writer.append(b"one")
            assert list(store.list()) == []
            writer.append(b"two")
            assert writer.commit().size == 6
        assert store.read("a") == b"onetwo"

    def test_a_writer_does_not_keep_the_buffer(self, store: BlobStore) -> None:
        buffer = bytearray(b"abc")
        with store.open_writer("a") as writer:
            writer.append(buffer)
            buffer[:] = b"xyz"
            writer.append(buffer)
            writer.commit()
        assert store.read("a") == b"abcxyz"

    def test_a_writer_whose_block_raises_leaves_the_old_blob(self, store: BlobStore) -> None:
        store.write("a", b"old")
        with pytest.raises(RuntimeError, match="crash"), store.open_writer("a") as writer:
            writer.append(b"half")
            raise RuntimeError("crash")
        assert [info.key for info in store.list()] == ["a"]
        assert store.read("a") == b"old"
        assert store.sweep() == 0

    def test_a_writer_that_has_ended_takes_nothing_more(self, store: BlobStore) -> None:
        with store.open_writer("a") as writer:
            writer.commit()
            writer.abort()
            with pytest.raises(ClosedError):
                writer.append(b"late")
            with pytest.raises(ClosedError):
                writer.commit()
        assert store.read("a") == b""

    @pytest.mark.parametrize("key", HOSTILE_KEYS, ids=lambda key: ascii(key)[:20])
    def test_a_key_that_could_lead_outside_is_refused(self, store: BlobStore, key: str) -> None:
        uses = (store.read, store.delete, store.stat, store.open_writer)
        for use in uses:
            with pytest.raises(InvalidInputError, match="is not a valid key"):
                use(key)
        for put in (store.write, store.create):
            with pytest.raises(InvalidInputError, match="is not a valid key"):
                put(key, b"")

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_a_harmless_key_is_kept_as_it_is(self, store: BlobStore, key: str) -> None:
        store.write(key, key.encode())
        assert store.read(key) == key.encode()
        assert [info.key for info in store.list()] == [key]
        store.delete(key)
        assert list(store.list()) == []
