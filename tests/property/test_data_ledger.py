"""A ledger takes every position once and survives packing."""

from hypothesis import given
from hypothesis import strategies as st

from tensorforge.data import Ledger, partition
from tensorforge.errors import EncodingError


@given(st.binary(max_size=20))
def test_arbitrary_bytes_are_a_proven_ledger_or_an_error(data):
    try:
        Ledger.unpack(b"\x01" + data).prove()
    except EncodingError:
        return


@given(st.integers(0, 200), st.integers(1, 20), st.integers(1, 9))
def test_the_steps_of_an_epoch_take_every_position_once(size, shards, batch):
    ledger, seen = Ledger(size, shards), []
    for taken in ledger.steps(batch):
        assert all(part.size <= batch for part in taken)
        ledger = ledger.commit(ledger.committed_step + 1, taken)
        ledger.prove()
        assert Ledger.unpack(ledger.pack()) == ledger
        seen += [n for part in taken for n in range(part.start_index, part.end_index)]
    assert sorted(seen) == list(range(size))
    assert ledger.is_complete
    largest = max(shard.size for shard in partition(size, shards))
    assert ledger.committed_step + 1 == -(-largest // batch)
