import pytest

from tensorforge.data import HistoryWriter, prove_history
from tensorforge.errors import ConflictError, EncodingError, IntegrityError, NotFoundError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def test_a_history_proves_that_each_sample_came_once(path):
    with HistoryWriter(path, 10, 2) as history:
        history.append(0, 0, [(0, 3), (5, 8)], generation=1)
        history.append(0, 1, [(3, 5), (8, 10)], generation=2)
        history.append(1, 2, [(0, 3)], generation=2)
    proof = prove_history(path)
    assert [p.is_complete for p in proof.epochs] == [True, False]
    assert (proof.ledger.epoch, proof.ledger.samples, proof.generations) == (1, 3, 2)
    assert not proof.is_complete


def test_two_members_may_write_the_same_step(path):
    with HistoryWriter(path, 4, 1) as one, HistoryWriter(path, 4, 1) as other:
        one.append(0, 0, [(0, 2)])
        other.append(0, 0, [(0, 2)])
        other.append(0, 1, [(2, 4)])
    assert prove_history(path).is_complete


def test_what_came_after_the_resumed_step_is_void(path):
    with HistoryWriter(path, 4, 1) as history:
        history.append(0, 0, [(0, 2)])
        history.append(0, 1, [(2, 3)])
    with HistoryWriter(path, 4, 1) as history:
        history.resume(0)
        history.append(0, 1, [(2, 4)])
    proof = prove_history(path)
    assert proof.is_complete
    assert proof.voided_steps == 1


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((0, 1, [(1, 3)]), "step 1 takes 1-2 again"),
        ((0, 2, [(2, 3)]), "step 2 does not follow 0"),
        ((0, 0, [(2, 3)]), "step 0 was committed twice"),
        ((1, 1, [(0, 1)]), "epoch 0 is not over: 2-4 remain"),
        ((3, 1, [(0, 1)]), "epoch 3 does not follow 0"),
    ],
)
def test_a_history_that_doubles_or_skips_is_no_proof(path, second, message):
    with HistoryWriter(path, 4, 1) as history:
        history.append(0, 0, [(0, 2)])
        history.append(*second)
    with pytest.raises(IntegrityError, match=message):
        prove_history(path)


def test_a_line_that_its_writer_did_not_finish_is_ignored(path):
    with HistoryWriter(path, 4, 1) as history:
        history.append(0, 0, [(0, 2)])
    with path.open("ab") as file:
        file.write(b'{"epoch":0,"step":1,"gener')
    assert prove_history(path).ledger.committed_step == 0
    with HistoryWriter(path, 4, 1) as history:
        history.append(0, 1, [(2, 4)])
    assert prove_history(path).is_complete


def test_another_runs_history_is_not_continued(path):
    HistoryWriter(path, 4, 1).close()
    with pytest.raises(ConflictError, match="another run's history"):
        HistoryWriter(path, 5, 1)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}\n", b"hello\n", b'{"format":"tensorforge-ledger","version":1}\n'],
)
def test_a_file_that_is_no_history_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(EncodingError):
        prove_history(path)


@pytest.mark.parametrize(
    "line", [b"{}", b'{"epoch":0,"step":true,"generation":0,"taken":[]}', b"7"]
)
def test_a_foreign_line_is_refused_with_its_number(path, line):
    HistoryWriter(path, 4, 1).close()
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(EncodingError, match="line 2"):
        prove_history(path)


def test_a_missing_file_is_said_to_be_missing(path):
    with pytest.raises(NotFoundError, match="no ledger history"):
        prove_history(path)
