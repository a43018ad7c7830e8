import numpy as np
import pytest

from tensorforge.data import (
    PackedDataset,
    ShuffledOrder,
    pack_array,
    pack_records,
    token_windows,
)
from tensorforge.errors import (
    AlreadyExistsError,
    EncodingError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
)
from tensorforge.storage.memory_store import MemoryStore


def test_a_packed_array_is_a_data_set_in_itself():
    blobs = MemoryStore()
    array = np.random.default_rng(1).normal(size=(33, 4)).astype("<f4")
    info = pack_array(blobs, array, segments=5)
    packed = PackedDataset(blobs)
    packed.verify()
    assert (len(packed), packed.info, info.schema.dtype) == (33, info, "<f4")
    assert all(np.array_equal(packed[i], array[i]) for i in range(33))
    with pytest.raises(IndexError):
        packed[33]
    with pytest.raises(IndexError):
        packed[-1]


def test_packing_can_shuffle_so_that_each_shard_is_a_fair_draw():
    blobs = MemoryStore()
    pack_array(blobs, np.arange(100), segments=4, shuffle_seed=9)
    packed = PackedDataset(blobs)
    values = [int(packed[i]) for i in range(100)]
    assert sorted(values) == list(range(100))
    assert values == ShuffledOrder(100, 9).take(0, 100).tolist()


def test_records_are_packed_with_their_lengths():
    blobs = MemoryStore()
    records = [b"x" * (n % 5) + b"%d" % n for n in range(23)]
    progress = []
    pack_records(blobs, records, segments=3, progress=lambda done, total: progress.append(done))
    packed = PackedDataset(blobs)
    assert [packed[i] for i in range(23)] == records
    assert progress == [8, 16, 23]


def test_tokens_become_samples_that_share_their_edges():
    windows = token_windows(np.arange(20, dtype=np.uint16), 5)
    assert windows.tolist()[:2] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert len(windows) == 4
    for tokens, length in ((np.arange(3), 5), (np.arange(9), 1), (np.zeros((2, 2)), 2)):
        with pytest.raises(InvalidInputError):
            token_windows(tokens, length)


def test_a_data_set_is_packed_once():
    blobs = MemoryStore()
    pack_array(blobs, np.arange(5))
    with pytest.raises(AlreadyExistsError):
        pack_array(blobs, np.arange(5))


def test_a_damaged_or_incomplete_packing_is_found():
    blobs = MemoryStore()
    with pytest.raises(NotFoundError, match="no packed data set"):
        PackedDataset(blobs)
    pack_array(blobs, np.arange(50), segments=2)
    first, second = [info.key for info in blobs.list("segments/")]
    content = bytearray(blobs.read(first))
    content[70] ^= 4
    blobs.write(first, bytes(content))
    packed = PackedDataset(blobs)
    assert int(packed[49]) == 49
    with pytest.raises(IntegrityError):
        packed.verify()
    blobs.delete(second)
    with pytest.raises(EncodingError, match="lacks the samples 25-50"):
        PackedDataset(blobs)
