"""One thread makes all changes: which changes share a commit, and which caller gets which error."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest
from tests.unit.registry.sample_values import metadata

from tensorforge.errors import AlreadyExistsError, ClosedError, UnavailableError
from tensorforge.registry import DeploymentState, ModelRegistry
from tensorforge.registry.service.write_queue import MAX_BATCH, WriteQueue
from tensorforge.storage.write_batch import WriteBatch


@pytest.fixture
def file_registry(tmp_path):
    with ModelRegistry(tmp_path / "registry.db") as opened:
        yield opened


@pytest.fixture
def writes(file_registry):
    opened = WriteQueue(file_registry.database)
    yield opened
    opened.close()


class Gate:
    """Keeps the thread of the queue busy until all other changes wait."""

    def __init__(self, writes):
        self._writes = writes
        self._began, self._open = threading.Event(), threading.Event()

    def _hold(self):
        self._began.set()
        assert self._open.wait(30)

    async def together(self, *changes):
        """The outcomes of changes that all wait when the thread comes to them."""
        first = asyncio.ensure_future(self._writes.run(self._hold))
        await asyncio.to_thread(self._began.wait, 30)
        rest = [asyncio.ensure_future(self._writes.run(*change)) for change in changes]
        # Each runs until it waits for its answer, and by then it is in line.
        await asyncio.sleep(0)
        self._open.set()
        _, *outcomes = await asyncio.gather(first, *rest, return_exceptions=True)
        return outcomes


def count_commits(monkeypatch):
    commits = []
    commit = WriteBatch.commit
    monkeypatch.setattr(WriteBatch, "commit", lambda self: (commits.append(1), commit(self))[1])
    return commits


def test_changes_that_wait_together_share_a_commit(file_registry, writes, monkeypatch):
    commits = count_commits(monkeypatch)
    changes = [(file_registry.create_model, f"m{n}") for n in range(10)]
    made = asyncio.run(Gate(writes).together(*changes))
    assert [each.model_id for each in made] == [f"m{n}" for n in range(10)]
    assert len(commits) == 1
    assert file_registry.verify_audit().sequence == 10


def test_one_that_fails_harms_no_other_and_hears_its_own_error(file_registry, writes):
    file_registry.create_model("taken")
    names = ["a", "taken", "b", "../c", "b", "d"]
    made = asyncio.run(Gate(writes).together(*((file_registry.create_model, n) for n in names)))
    kinds = ["made" if hasattr(each, "model_id") else type(each).__name__ for each in made]
    taken, wrong = "AlreadyExistsError", "InvalidInputError"
    assert kinds == ["made", taken, "made", wrong, taken, "made"]
    assert "'b'" in str(made[4])
    assert file_registry.model_count() == 4
    assert file_registry.verify_audit().sequence == 4


def test_a_change_reads_what_those_before_it_in_the_same_commit_wrote(file_registry, writes):
    def rename():
        file_registry.rename_model("a", "b")
        return file_registry.get_model("b")

    gate = Gate(writes)
    _, renamed, found = asyncio.run(
        gate.together((file_registry.create_model, "a"), (rename,), (file_registry.get_model, "b"))
    )
    assert renamed.model_id == found.model_id == "b"


def test_the_expected_revision_is_compared_within_a_commit_too(file_registry, writes):
    version = file_registry.register(metadata()).version

    def transition():
        return file_registry.transition_state(
            "ranker", version, DeploymentState.VALIDATING, expected_revision=0
        ).metadata.revision

    outcomes = asyncio.run(Gate(writes).together(*[(transition,)] * 16))
    assert outcomes.count(1) == 1
    assert {type(each).__name__ for each in outcomes if each != 1} == {"LostRaceError"}
    file_registry.verify_audit()


def test_a_commit_that_fails_is_everybodys_failure(file_registry, writes):
    def lose():
        with file_registry.database.write() as connection:
            connection.connection.driver_connection.execute("ROLLBACK")
            raise AlreadyExistsError("this was never true")

    changes = [(file_registry.create_model, "a"), (lose,), (file_registry.create_model, "b")]
    outcomes = asyncio.run(Gate(writes).together(*changes))
    assert [type(each) for each in outcomes] == [UnavailableError] * 3
    assert file_registry.model_count() == 0
    assert asyncio.run(writes.run(file_registry.create_model, "c")).model_id == "c"
    file_registry.verify_audit()


def test_no_commit_waits_for_more_than_a_bounded_number_of_changes(
    file_registry, writes, monkeypatch
):
    commits = count_commits(monkeypatch)
    changes = [(file_registry.create_model, f"m{n}") for n in range(MAX_BATCH + 5)]
    made = asyncio.run(Gate(writes).together(*changes))
    assert len({each.model_id for each in made}) == MAX_BATCH + 5
    assert len(commits) == 2


def test_whoever_does_not_wait_any_more_leaves_the_others_their_answers(file_registry, writes):
    async def give_up():
        began, go = threading.Event(), threading.Event()

        def slow():
            began.set()
            assert go.wait(30)

        slowly = asyncio.ensure_future(writes.run(slow))
        await asyncio.to_thread(began.wait, 30)
        impatient = asyncio.ensure_future(writes.run(file_registry.create_model, "a"))
        patient = asyncio.ensure_future(writes.run(file_registry.create_model, "b"))
        await asyncio.sleep(0)
        impatient.cancel()
        go.set()
        await slowly
        return await patient

    assert asyncio.run(give_up()).model_id == "b"
    assert file_registry.model_count() == 2


def test_a_loop_that_ended_meanwhile_leaves_the_others_their_answers(file_registry, writes):
    began, go = threading.Event(), threading.Event()

    def slow():
        began.set()
        assert go.wait(30)

    async def leave_at_once():
        slowly = asyncio.ensure_future(writes.run(slow))
        await asyncio.to_thread(began.wait, 30)
        slowly.cancel()

    asyncio.run(leave_at_once())
    go.set()
    for name in "ab":  # the first may still share the commit
        assert asyncio.run(writes.run(file_registry.create_model, name)).model_id == name


def test_a_queue_that_nobody_closed_does_not_keep_the_interpreter_from_ending(tmp_path):
    script = """if True:
        import asyncio, sys
        from tensorforge.registry import ModelRegistry
        from tensorforge.registry.service.write_queue import WriteQueue
        registry = ModelRegistry(sys.argv[1])
        print(asyncio.run(WriteQueue(registry.database).run(registry.create_model, "a")).model_id)
    """
    command = [sys.executable, "-c", script, str(tmp_path / "registry.db")]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert (done.stdout, done.returncode) == (b"a\n", 0), done.stderr.decode()


def test_a_closed_queue_accepts_nothing_more(file_registry):
    writes = WriteQueue(file_registry.database)
    assert asyncio.run(writes.run(file_registry.create_model, "a")).model_id == "a"
    writes.close()
    with pytest.raises(ClosedError):
        asyncio.run(writes.run(file_registry.create_model, "b"))
    assert file_registry.model_count() == 1
