from datetime import UTC, datetime, timedelta

import pytest
from tests.unit.catalog.run_states import flip_a_byte, make_state, step_on

from tensorforge.catalog import (
    CheckpointManager,
    CheckpointState,
    CreateCheckpointRequest,
    rebuild,
    sweep,
    verify,
)
from tensorforge.catalog.schema import CHECKPOINTS
from tensorforge.checkpoint import DistributedCheckpoint, SingleProcess
from tensorforge.errors import ConflictError, NotFoundError, UnavailableError

pytestmark = pytest.mark.filterwarnings("ignore::tensorforge.checkpoint.StaleSaveWarning")


def test_the_catalog_is_rebuilt_from_manifests_alone(runs, manager, store, tmp_path):
    state = make_state()
    for step in range(3):
        step_on(state, step)
        runs.save(state, epoch=0, step=step, metrics={"loss": float("nan") if step else 1.0})
    with CheckpointManager(database=tmp_path / "new.db") as again:
        report = rebuild(again, store)
        originals = manager.list_for_run("a run/1")
        assert set(report.adopted) == {record.checkpoint_id for record in originals}
        for old, new in zip(originals, again.list_for_run("a run/1"), strict=True):
            assert (new.checkpoint_id, new.parent_id, new.step) == (
                old.checkpoint_id,
                old.parent_id,
                old.step,
            )
            assert (new.size_bytes, new.storage_path) == (old.size_bytes, old.storage_path)
            assert (new.created_at, new.checkpoint_type) == (old.created_at, old.checkpoint_type)
            assert str(dict(new.metrics)) == str(dict(old.metrics))
        assert rebuild(again, store).adopted == ()


def test_a_rebuild_enters_what_it_cannot_read_as_corrupted(runs, store, tmp_path):
    state = make_state()
    first = runs.save(state, epoch=0, step=0)
    step_on(state, 1)
    second = runs.save(state, epoch=0, step=1)
    key = f"{first.storage_path}.metadata.json"
    store.write(key, store.read(key)[:-10])
    with CheckpointManager(database=tmp_path / "new.db") as again:
        report = rebuild(again, store)
        assert report.corrupted == (first.checkpoint_id,)
        assert again.get(first.checkpoint_id).training_run_id == "a run/1"
        assert again.get_latest("a run/1") is None, second


def test_a_rebuild_reports_checkpoints_that_no_catalog_wrote(store, manager):
    with DistributedCheckpoint(SingleProcess(), store) as checkpoint:
        prefix = checkpoint.save(make_state())
        assert rebuild(manager, store).foreign == (prefix,)


def test_verifying_finds_damage_and_marks_all_that_rests_on_it(runs, manager, store):
    state = make_state()
    first = runs.save(state, epoch=0, step=0)
    step_on(state, 1)
    second = runs.save(state, epoch=0, step=1)
    assert verify(manager, store, second.checkpoint_id).is_valid
    flip_a_byte(store, first)
    report = verify(manager, store, first.checkpoint_id)
    assert "rank-00000" in report.errors[0].message
    assert manager.get(second.checkpoint_id).state is CheckpointState.CORRUPTED
    with pytest.raises(ConflictError, match="corrupted"):
        verify(manager, store, first.checkpoint_id)
    with pytest.raises(NotFoundError):
        verify(manager, store, "nothing")


def test_a_save_that_is_going_on_is_left_alone(runs, manager):
    from tensorforge.catalog import CreateCheckpointRequest
    from tensorforge.processes import ProcessIdentity

    asked = CreateCheckpointRequest(training_run_id="a run/1", epoch=0, step=0)
    record = manager.create(asked, note=ProcessIdentity.current().to_text())
    assert runs.sweep().deleted == ()
    assert manager.get(record.checkpoint_id).state is CheckpointState.CREATING


def test_a_process_that_cannot_be_seen_is_given_a_day(manager, store):
    from tensorforge.catalog import CreateCheckpointRequest
    from tensorforge.processes import ProcessIdentity

    asked = CreateCheckpointRequest(training_run_id="run", epoch=0, step=0)
    elsewhere = ProcessIdentity("another host", "", "", 1, 0.0).to_text()
    nobody = ProcessIdentity.of(1 << 30).to_text()
    by_nobody, by_a_person, unseen, ended = (
        manager.create(asked, note=note).checkpoint_id
        for note in ("", "what somebody wrote", elsewhere, nobody)
    )
    assert sweep(manager, store).deleted == (ended,)
    a_day_later = datetime.now(UTC) + timedelta(days=1, seconds=1)
    assert sweep(manager, store, a_day_later).deleted == (unseen,)
    left = {record.checkpoint_id for record in manager.list_for_run("run")}
    assert {by_nobody, by_a_person} <= left


def test_a_run_removes_the_files_of_its_own_deletions_only(store, tmp_path):
    removed = []

    def away(record):
        raise UnavailableError("the store is away")

    with CheckpointManager(database=tmp_path / "shared.db", remove_files=removed.append) as manager:
        for run in ("a", "b"):
            request = CreateCheckpointRequest(training_run_id=run, epoch=0, step=1)
            record = manager.create(request)
            manager.complete(record.checkpoint_id, 1, f"{run}/x")
        with CheckpointManager(database=tmp_path / "shared.db", remove_files=away) as other:
            other.delete(manager.list_for_run("a")[0].checkpoint_id)
        assert [r.training_run_id for r in manager.with_files_left()] == ["a"]
        manager.delete(manager.list_for_run("b")[0].checkpoint_id)
        assert [r.training_run_id for r in removed] == ["b"]
        manager.gc(training_run_id="a")
        assert [r.training_run_id for r in removed] == ["b", "a"]
        assert manager.with_files_left() == ()


def test_a_record_marked_without_reason_is_complete_after_a_rebuild(runs, manager, store):
    record = runs.save(make_state(), epoch=0, step=1)
    manager.mark_corrupted(record.checkpoint_id, "by mistake")
    assert rebuild(manager, store).recovered == (record.checkpoint_id,)
    assert manager.get(record.checkpoint_id).state is CheckpointState.COMPLETE


def test_a_record_that_names_a_manifest_is_read_as_a_prefix(manager):
    record = manager.create(CreateCheckpointRequest(training_run_id="r", epoch=0, step=1))
    done = manager.complete(record.checkpoint_id, 1, "r/x.metadata.json")
    assert done.storage_path == "r/x"
    with manager._database.write() as connection:
        connection.execute(CHECKPOINTS.update().values(storage_path="r/x.metadata.json"))
    assert manager.get(record.checkpoint_id).storage_path == "r/x"
