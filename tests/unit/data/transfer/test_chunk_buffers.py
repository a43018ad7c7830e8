"""Memory for chunks: bounded, reused, and waited for."""

import mmap
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.cluster.workers import WorkerId
from tensorforge.data import (
    DatasetInfo,
    DataTransfer,
    DataTransferManager,
    HostBuffers,
    SampleSchema,
    ShardServer,
    ShardStore,
    partition,
)
from tensorforge.data.segments.segment import BLOCK
from tensorforge.errors import CapacityError, DeadlineExceededError, InvalidInputError
from tensorforge.memory import TensorArena

PAGE = mmap.PAGESIZE


def address(view):
    return np.frombuffer(view, np.uint8).ctypes.data


def test_what_was_given_back_is_lent_again():
    buffers = HostBuffers(2 * PAGE)
    seen = set()
    for _ in range(50):
        handle = buffers.acquire(PAGE, 0.0)
        seen.add(address(handle.buffer()))
        handle.free()
    assert len(seen) == 1
    assert buffers.peak_bytes == PAGE


def test_who_finds_no_room_waits_until_there_is_some():
    buffers = HostBuffers(2 * PAGE)
    held = [buffers.acquire(PAGE, 0.0) for _ in range(2)]
    got = []
    waiting = threading.Thread(target=lambda: got.append(buffers.acquire(2 * PAGE, 60.0)))
    waiting.start()
    held[0].free()
    waiting.join(0.05)
    assert waiting.is_alive()  # one page is not enough
    held[1].free()
    waiting.join(60)
    assert len(got[0].buffer()) == 2 * PAGE


def test_a_wait_ends_and_says_how_much_is_in_use():
    buffers = HostBuffers(2 * PAGE)
    held = buffers.acquire(PAGE + 1, 0.0)
    with pytest.raises(DeadlineExceededError, match=f"{2 * PAGE} of {2 * PAGE} are in use"):
        buffers.acquire(1, 0.01)
    held.free()
    held.free()  # again changes nothing
    assert buffers.lent_bytes == 0


def test_what_can_never_fit_is_refused_at_once():
    buffers = HostBuffers(PAGE)
    with pytest.raises(CapacityError, match=f"the pool has only {PAGE}"):
        buffers.acquire(PAGE + 1, 60.0)
    with pytest.raises(InvalidInputError, match="size = 0"):
        buffers.acquire(0, 60.0)
    with pytest.raises(InvalidInputError, match="at least 1 byte"):
        HostBuffers(0)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 3 * PAGE)), max_size=60))
def test_lent_pieces_never_overlap_and_never_exceed_the_capacity(history):
    buffers = HostBuffers(8 * PAGE)
    lent = {}
    for slot, nbytes in history:
        if slot in lent:
            handle, mark = lent.pop(slot)
            assert bytes(handle.buffer()) == bytes([mark]) * len(handle.buffer())
            handle.free()
        else:
            try:
                handle = buffers.acquire(nbytes, 0.0)
            except DeadlineExceededError:
                continue
            handle.buffer()[:] = bytes([slot + 1]) * nbytes
            lent[slot] = handle, slot + 1
        assert buffers.lent_bytes <= buffers.capacity
    for handle, mark in lent.values():
        assert bytes(handle.buffer()) == bytes([mark]) * len(handle.buffer())


def test_the_books_are_kept_without_torch():
    script = (
        "import sys; from tensorforge.data import HostBuffers; HostBuffers(9).acquire(9, 0);"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_arena_of_the_memory_pool_lends_chunk_buffers(tmp_path):
    info = DatasetInfo(size=40, schema=SampleSchema(dtype="|u1", shape=(100_000,)))
    rows = np.random.default_rng(0).integers(0, 256, (40, 100_000), dtype=np.uint8)
    me = WorkerId("me", "127.0.0.1", 1)
    with (
        ShardStore(tmp_path / "a", info) as source,
        ShardStore(tmp_path / "b", info) as store,
        ShardServer(source) as server,
        TensorArena(2 * BLOCK) as arena,
        DataTransferManager(worker=me, store=store, buffers=arena) as manager,
    ):
        source.put(0, 40, rows)
        moves = [
            DataTransfer(
                source_worker=WorkerId("source", *server.address),
                destination_worker=me,
                shard=shard,
            )
            for shard in partition(40, 8)
        ]
        manager.launch(moves).wait(60)
        assert all(np.array_equal(store[i], rows[i]) for i in range(40))
        assert arena.stats().allocated_bytes == 0
