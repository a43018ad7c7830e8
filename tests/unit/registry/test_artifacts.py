import hashlib

import pytest

from tensorforge.errors import (
    AlreadyExistsError,
    CapacityError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
)
from tensorforge.registry.artifacts import ArtifactStore
from tensorforge.storage.memory_store import MemoryStore


@pytest.fixture
def store():
    return MemoryStore("artifacts")


@pytest.fixture
def artifacts(registry, store):
    return ArtifactStore(registry.database, store, max_bytes=100)


def put(artifacts, path, data, sha256=""):
    with artifacts.begin(path, uploaded_by="ann", sha256=sha256) as upload:
        upload.append(data)
        return upload.finish()


def content(artifacts, path):
    file = artifacts.find(path)
    return b"".join(artifacts.read(file, 0, file.size_bytes))


def test_a_file_is_read_as_it_was_written(artifacts):
    stored = put(artifacts, "a/b", b"hello")
    assert stored.sha256 == hashlib.sha256(b"hello").hexdigest()
    assert content(artifacts, "a/b") == b"hello"
    put(artifacts, "a/b", b"again")
    assert content(artifacts, "a/b") == b"again"
    assert [(e.name, e.is_folder) for e in artifacts.list("")] == [("a", True)]
    assert [(e.name, e.size_bytes) for e in artifacts.list("a")] == [("b", 5)]
    artifacts.delete("a")
    with pytest.raises(NotFoundError):
        artifacts.find("a/b")


def test_parts_may_come_in_any_order_and_twice(artifacts, store):
    data = bytes(range(90))
    for start in (60, 30, 30):
        received = artifacts.put_part("f", start, 90, data[start : start + 30], uploaded_by="ann")
        assert received == 0
    assert artifacts.received("f", 90) == 0
    digest = hashlib.sha256(data).hexdigest()
    assert artifacts.put_part("f", 0, 90, data[:30], uploaded_by="ann", sha256=digest) == 90
    assert content(artifacts, "f") == data
    assert [info.key for info in store.list("parts/")] == []


def test_a_wrong_checksum_or_a_file_that_is_too_large_is_not_kept(artifacts, store):
    with pytest.raises(IntegrityError):
        put(artifacts, "f", b"hello", sha256="0" * 64)
    with pytest.raises(CapacityError):
        put(artifacts, "f", b"x" * 101)
    with pytest.raises(CapacityError):
        artifacts.put_part("f", 0, 101, b"x", uploaded_by="ann")
    with pytest.raises(NotFoundError):
        artifacts.find("f")
    assert list(store.list("blobs/")) == []


def test_a_file_of_a_version_is_written_once(artifacts, store):
    put(artifacts, "versions/m/1/f", b"one")
    put(artifacts, "versions/m/1/f", b"one")
    with pytest.raises(AlreadyExistsError):
        put(artifacts, "versions/m/1/f", b"two")
    with pytest.raises(InvalidInputError):
        artifacts.delete("versions/m/1/f")
    assert content(artifacts, "versions/m/1/f") == b"one"
    assert len(list(store.list("blobs/"))) == 1


def test_a_damaged_file_shows_when_it_is_read(artifacts, store):
    stored = put(artifacts, "f", b"hello")
    store.write(stored.blob, b"hellO")
    with pytest.raises(IntegrityError, match="damaged"):
        content(artifacts, "f")


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../b", "", "a//b", "a\x00b"])
def test_a_path_never_leads_elsewhere(artifacts, path):
    with pytest.raises(InvalidInputError):
        put(artifacts, path, b"x")
