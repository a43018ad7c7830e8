import json

import numpy as np
import pytest

from tensorforge.cli import main as cli
from tensorforge.data import DatasetInfo, HistoryWriter, SampleSchema, ShardStore


@pytest.fixture
def run(capsys):
    def run(*words, code=0):
        with pytest.raises(SystemExit) as caught:
            cli.main(["data", *map(str, words)])
        found = capsys.readouterr()
        assert caught.value.code == code, found.err
        return found.out if not code else found.err

    return run


def test_a_dry_run_shows_what_moves_beside_the_minimum(run):
    shown = run("plan", "--samples", 9000, "--from", 8, "--to", 9)
    assert "1000 move (11.11%), the minimum is 1000" in shown
    found = json.loads(run("plan", "--samples", 9000, "--from", 8, "--to", 9, "--json"))
    assert (found["moved_units"], found["minimum_moves"], found["from_origin"]) == (1000, 1000, 0)
    assert sum(move["stop"] - move["start"] for move in found["transfers"]) == 1000


def test_lost_workers_data_come_from_the_origin(run):
    words = ("--samples", 90, "--from", 3, "--to", 3, "--lost", 1, "--json")
    found = json.loads(run("plan", *words))
    assert (found["moved_units"], found["from_origin"]) == (30, 30)
    assert {move["source"] for move in found["transfers"]} == {None}


def test_whole_shards_and_the_other_strategy(run):
    words = ("plan", "--samples", 120, "--from", 2, "--to", 3, "--strategy", "full_reshuffle")
    assert "60 move (50.00%), the minimum is 40" in run(*words)
    assert "6 move (50.00%), the minimum is 4" in run(*words, "--shards", 12)


@pytest.mark.parametrize(
    "words",
    [
        ("--from", 1, "--to", 0),
        ("--from", 1, "--to", 1, "--lost", 2),
        ("--from", 1, "--to", 1, "--consumed", 11),
        ("--from", 1, "--to", 1, "--consumed", 1, "--shards", 2),
    ],
)
def test_an_impossible_plan_is_a_message(run, words):
    assert run("plan", "--samples", 10, *words, code=1).startswith("error: ")


def test_the_ledger_is_printed_as_proof(run, tmp_path):
    path = tmp_path / "ledger.jsonl"
    with HistoryWriter(path, 10, 2) as history:
        history.append(0, 0, [(0, 5), (5, 10)], generation=1)
        history.append(1, 1, [(0, 4)], generation=2)
    shown = run("ledger", path)
    assert "epoch 0, step 0: 10 consumed + 0 remaining = 10 samples" in shown
    assert "proven from 2 committed steps of 2 generations" in shown
    found = json.loads(run("ledger", path, "--json"))
    assert (found["proven"], found["complete"], len(found["epochs"])) == (True, False, 2)
    assert "6 samples of the last epoch remain" in run("ledger", path, "--complete", code=1)


def test_a_ledger_that_proves_nothing_is_a_failure(run, tmp_path):
    path = tmp_path / "ledger.jsonl"
    with HistoryWriter(path, 10, 2) as history:
        history.append(0, 0, [(0, 5)])
        history.append(0, 1, [(4, 6)])
    assert "takes 4-5 again" in run("ledger", path, code=1)
    assert "no ledger history" in run("ledger", tmp_path / "none", code=1)


def test_arrays_tokens_and_lines_are_packed_and_verified(run, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(60, dtype=np.int32).reshape(20, 3))
    np.save(tmp_path / "t.npy", np.arange(101, dtype=np.uint16))
    (tmp_path / "l.txt").write_bytes(b"one\ntwo\n\nthree\n")
    packed = run("pack", tmp_path / "a.npy", tmp_path / "a", "--segments", 4, "--shuffle", 1)
    assert "a data set of 20 arrays of <i4 (3,)" in packed
    words = ("pack", tmp_path / "t.npy", tmp_path / "t", "--kind", "tokens", "--sample-length", 11)
    assert "10 arrays of <u2 (11,)" in run(*words)
    run("pack", tmp_path / "l.txt", tmp_path / "l", "--kind", "lines")
    assert json.loads(run("verify", tmp_path / "l", "--json")) == {
        "size": 3,
        "dtype": None,
        "shape": [],
        "held": 3,
    }
    assert "20 samples verified" in run("verify", tmp_path / "a")
    segment = next((tmp_path / "a" / "segments").iterdir())
    content = bytearray(segment.read_bytes())
    content[70] ^= 1
    segment.write_bytes(content)
    assert "is damaged" in run("verify", tmp_path / "a", code=1)


def test_a_workers_store_is_verified_too(run, tmp_path):
    info = DatasetInfo(size=9, schema=SampleSchema())
    with ShardStore(tmp_path / "store", info) as store:
        store.put(3, 5, [b"x", b"yy"])
    assert "2 samples verified" in run("verify", tmp_path / "store")


def test_mistakes_in_packing_are_messages(run, tmp_path):
    (tmp_path / "x.npy").write_bytes(b"no array")
    target = tmp_path / "out"
    assert "no file" in run("pack", tmp_path / "none.npy", target, code=1)
    assert "not a .npy file" in run("pack", tmp_path / "x.npy", target, code=1)
    assert "--sample-length" in run("pack", tmp_path / "x.npy", target, "--kind", "tokens", code=1)
    assert "no packed data set" in run("verify", target, code=1)
