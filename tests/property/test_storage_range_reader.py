"""Property tests: a range of a file is read right in whatever steps, and wherever its bytes lie."""

from __future__ import annotations

import contextlib
import itertools
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorforge.errors import EncodingError
from tensorforge.storage import range_reader
from tensorforge.storage.local_store import LocalStore

CONTENT = os.urandom(200_000)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with contextlib.closing(LocalStore(tmp_path_factory.mktemp("store"))) as store:
        store.write("a", CONTENT)
        yield store


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    offset=st.integers(0, 50_000),
    lengths=st.lists(st.integers(0, 30_000), min_size=1, max_size=5),
    cached=st.sampled_from([True, False, None]),
    together=st.booleans(),
)
def test_every_byte_is_read_and_seen_once(store, offset, lengths, cached, together):
    """`together`: another range is read in between, by the same thread."""
    seen: list[list[bytes]] = [[] for _ in lengths]
    buffers = [memoryview(bytearray(length)) for length in lengths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_reader, "_PIECE", 10_000)
        patch.setattr(range_reader, "_BOUNCE", 16_384)
        patch.setattr("tensorforge.storage.local_store._SMALL_READ", 0)
        patch.setattr("tensorforge.storage.local_store.is_cached", lambda *_: cached)
        with store.open_range("a", offset, sum(lengths)) as reader:
            for buffer, pieces in zip(buffers, seen, strict=True):
                reader.fill(buffer, lambda piece, pieces=pieces: pieces.append(bytes(piece)))
                if together:
                    store.read_into("a", 1, memoryview(bytearray(5_000)))
    starts = itertools.accumulate(lengths, initial=offset)
    for start, buffer, pieces in zip(starts, buffers, seen, strict=False):
        assert buffer == CONTENT[start : start + len(buffer)]
        assert b"".join(pieces) == buffer


@pytest.mark.parametrize("cached", [True, False, None])
def test_a_file_that_is_cut_short_meanwhile_is_an_error(tmp_path, monkeypatch, cached):
    monkeypatch.setattr("tensorforge.storage.local_store.is_cached", lambda *_: cached)
    with contextlib.closing(LocalStore(tmp_path)) as store:
        store.write("a", CONTENT)
        with store.open_range("a", 0, len(CONTENT)) as reader:
            os.truncate(tmp_path / "a", 70_000)
            with pytest.raises(EncodingError, match="a ended while it was read: it is truncated"):
                reader.fill(memoryview(bytearray(len(CONTENT))))
