import json
from dataclasses import replace

import pytest

from tensorforge.data import DataShard, IntervalSet, Ledger
from tensorforge.encoding import decode, encode
from tensorforge.errors import ConflictError, EncodingError, IntegrityError, InvalidInputError


def test_each_step_takes_one_batch_from_every_shard_until_the_ragged_end():
    ledger = Ledger(10, 3)  # shards of 4, 3 and 3
    taken = list(ledger.steps(2))
    assert taken == [
        (DataShard(0, 0, 2), DataShard(1, 4, 6), DataShard(2, 7, 9)),
        (DataShard(0, 2, 4), DataShard(1, 6, 7), DataShard(2, 9, 10)),
    ]


def test_the_cursor_moves_only_with_a_commit():
    ledger = Ledger(10, 3)
    after = ledger.commit(0, ledger.next_batches(2))
    assert [ledger.cursor(shard) for shard in range(3)] == [0, 4, 7]
    assert [after.cursor(shard) for shard in range(3)] == [2, 6, 9]
    assert (after.committed_step, after.samples, after.remaining.size) == (0, 6, 4)


@pytest.mark.parametrize("step", [-1, 0, 2, 7])
def test_a_step_must_follow_the_last_one(step):
    ledger = Ledger(10, 2).commit(0, [(0, 1)])
    with pytest.raises(ConflictError, match=f"step {step} does not follow 0"):
        ledger.commit(step, [(1, 2)])


@pytest.mark.parametrize(
    ("taken", "message"),
    [
        ([(2, 5)], "takes 2-3 again"),
        ([(4, 6), (5, 7)], "takes a sample twice"),
        ([(8, 11)], "beyond the 10"),
        ([], "takes no sample"),
        ([(4, 4)], "takes no sample"),
    ],
)
def test_a_wrong_commit_is_refused_and_changes_nothing(taken, message):
    ledger = Ledger(10, 2).commit(0, [(0, 3)])
    with pytest.raises(ConflictError, match=message):
        ledger.commit(1, taken)
    assert ledger.consumed == IntervalSet(((0, 3),))


def test_the_next_epoch_begins_only_when_nothing_remains():
    ledger = Ledger(4, 2).commit(0, [(0, 3)])
    with pytest.raises(ConflictError, match="epoch 0 is not over: 3-4 remain"):
        ledger.next_epoch()
    following = ledger.commit(1, [(3, 4)]).next_epoch()
    assert (following.epoch, following.committed_step, following.samples) == (1, 1, 0)


def test_a_proof_says_that_nothing_is_missing_and_nothing_came_twice():
    proof = Ledger(10, 2).commit(0, [(0, 3)]).prove()
    assert str(proof) == (
        "epoch 0, step 0: 3 consumed + 7 remaining = 10 samples, none twice, none missing"
    )
    assert not proof.is_complete


def test_a_ledger_whose_counts_differ_is_not_believed():
    forged = replace(Ledger(10, 2).commit(0, [(0, 3)]), samples=4)
    with pytest.raises(IntegrityError, match="4 samples were committed, but 3 different ones"):
        forged.prove()


def test_a_ledger_is_a_few_bytes():
    ledger = Ledger(10**9, 48)
    for step in range(3):
        ledger = ledger.commit(step, ledger.next_batches(32))
    packed = ledger.pack()
    assert len(packed) < 48 * 7
    assert Ledger.unpack(packed) == ledger
    assert decode(json.loads(json.dumps(encode(ledger))), Ledger) == ledger


@pytest.mark.parametrize("damage", [b"", b"\x02", b"\x01\x05\x01\x00\x00\x00\x80", b"\xff" * 9])
def test_damaged_bytes_are_no_ledger(damage):
    with pytest.raises(EncodingError):
        Ledger.unpack(damage)


def test_an_unknown_shard_or_batch_is_an_error():
    with pytest.raises(InvalidInputError, match="shard_id = 2: there are 2 shards"):
        Ledger(4, 2).cursor(2)
    with pytest.raises(InvalidInputError, match="batch_size = 0"):
        Ledger(4, 2).next_batches(0)


def test_a_batch_stops_before_what_was_taken_out_of_order():
    ledger = Ledger(10, 1).commit(0, [(4, 6)])
    assert ledger.batch(0, 9) == DataShard(0, 0, 4)
    assert ledger.commit(1, [(0, 4)]).batch(0, 9) == DataShard(0, 6, 10)
