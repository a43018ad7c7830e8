import dataclasses
import itertools

import pytest

from tensorforge.data import DataShard, partition
from tensorforge.encoding import decode, encode
from tensorforge.errors import InvalidInputError


def test_a_shard_is_a_half_open_range():
    shard = DataShard(3, 10, 14)
    assert (shard.size, str(shard)) == (4, "shard 3 [10, 14)")
    assert DataShard(0, 7, 7).size == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        shard.end_index = 20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0, 5, 4), "start_index = 5: must not exceed end_index = 4"),
        ((-1, 0, 1), "shard_id = -1"),
        ((0, -1, 1), "start_index = -1"),
        ((0, 0, 1.0), "end_index = 1.0"),
        ((True, 0, 1), "shard_id = True"),
    ],
)
def test_a_wrong_shard_is_refused_with_the_field_named(fields, message):
    with pytest.raises(InvalidInputError, match=message):
        DataShard(*fields)


def test_a_shard_survives_encoding():
    shard = DataShard(1, 2, 10**12)
    assert decode(encode(shard), DataShard) == shard


@pytest.mark.parametrize(("size", "shards"), [(0, 1), (0, 5), (3, 7), (12, 12), (1001, 8)])
def test_a_partition_is_disjoint_complete_and_even(size, shards):
    parts = partition(size, shards)
    assert [part.shard_id for part in parts] == list(range(shards))
    assert (parts[0].start_index, parts[-1].end_index) == (0, size)
    for left, right in itertools.pairwise(parts):
        assert left.end_index == right.start_index
    sizes = [part.size for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sorted(sizes, reverse=True) == sizes


@pytest.mark.parametrize(("size", "shards"), [(-1, 1), (5, 0)])
def test_an_impossible_partition_is_an_error(size, shards):
    with pytest.raises(InvalidInputError):
        partition(size, shards)
