import numpy as np
import pytest
from tests.unit.data.segments.making import ARRAYS, collect

from tensorforge.data import DatasetInfo, ShardStore
from tensorforge.data.segments.segment import BLOCK
from tensorforge.errors import (
    ConflictError,
    InvalidInputError,
    TransferCancelledError,
)


def big(store, blocks=3, extra=1000):
    """A range of a few blocks and a bit: its samples as one body."""
    body = np.random.default_rng(1).bytes(blocks * BLOCK + extra)
    return body[: len(body) - len(body) % 12]


@pytest.fixture
def big_store(tmp_path):
    info = DatasetInfo(size=10**6, schema=ARRAYS.schema)
    with ShardStore(tmp_path / "big", info) as store:
        yield store


def test_an_interrupted_range_goes_on_after_its_last_whole_block(big_store):
    body = big(big_store)
    count = len(body) // 12
    with big_store.receive(0, count) as part:
        part.begin(len(body))
        part.append(body[:BLOCK])
        part.append(body[BLOCK : 2 * BLOCK])
        expected = part.prefix_checksum
    path = next((big_store.folder / "incoming").iterdir())
    with path.open("ab") as file:
        file.write(b"torn")  # the writer died in the middle of a block
    with big_store.receive(0, count) as part:
        part.begin(len(body))
        assert (part.verified_bytes, part.prefix_checksum) == (2 * BLOCK, expected)
        with pytest.raises(ConflictError, match="bytes were received"):
            part.commit()
        part.append(body[2 * BLOCK : 3 * BLOCK])
        part.append(body[3 * BLOCK :])
        part.commit()
    assert collect(big_store.open_range(0, count)) == body
    assert list((big_store.folder / "incoming").iterdir()) == []


def test_a_range_of_another_size_starts_from_nothing(big_store):
    with big_store.receive(0, 10**5) as part:
        part.begin(2 * BLOCK)
        part.append(bytes(BLOCK))
    with big_store.receive(0, 10**5) as part:
        assert part.verified_bytes == BLOCK
        part.begin(3 * BLOCK)
        assert part.verified_bytes == 0


def test_whoever_receives_a_range_anew_shuts_the_earlier_one_out(big_store):
    with big_store.receive(0, 10**5) as late:
        late.begin(2 * BLOCK)
        late.append(bytes(BLOCK))
        with big_store.receive(0, 10**5) as part:
            part.begin(2 * BLOCK)
            assert part.verified_bytes == BLOCK
            for attempt in (lambda: late.append(bytes(BLOCK)), late.restart, late.discard):
                with pytest.raises(TransferCancelledError, match="replaced this one"):
                    attempt()
            part.append(bytes(BLOCK))
            assert part.is_complete


def test_blocks_come_in_their_size(big_store):
    with big_store.receive(0, 10**5) as part:
        part.begin(2 * BLOCK)
        with pytest.raises(InvalidInputError, match=f"10 bytes, expected {BLOCK}"):
            part.append(bytes(10))
        part.discard()
