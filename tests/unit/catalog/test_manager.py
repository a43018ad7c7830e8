import math
from datetime import timedelta

import pytest

from tensorforge.catalog import (
    CheckpointManager,
    CheckpointState,
    CheckpointType,
    CreateCheckpointRequest,
    GcPolicy,
    RestoreCriteria,
)
from tensorforge.catalog.deletion import KEEP_DELETED_SECONDS
from tensorforge.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidInputError,
    NotFoundError,
    TransitionError,
    UnavailableError,
)
from tensorforge.storage.database import Database
from tensorforge.testing.clock import ManualClock


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def manager(database_url, clock):
    policy = GcPolicy(max_checkpoints_per_run=2)
    with CheckpointManager(policy, database=database_url, clock=lambda: clock.utc) as made:
        yield made


def request(step, run="run", kind=CheckpointType.FULL, **more):
    return CreateCheckpointRequest(
        training_run_id=run, epoch=0, step=step, checkpoint_type=kind, **more
    )


def incremental(step, **more):
    return request(step, kind=CheckpointType.INCREMENTAL, **more)


def save(manager, asked, size=100, **more):
    record = manager.create(asked)
    return manager.complete(record.checkpoint_id, size, f"run/{record.checkpoint_id}", **more)


def ids(records):
    return [record.checkpoint_id for record in records]


def test_a_new_checkpoint_is_being_created(manager, clock):
    record = manager.create(request(7, metrics={"loss": 0.5}))
    assert record.state is CheckpointState.CREATING
    assert (record.step, record.metrics["loss"], record.created_at) == (7, 0.5, clock.utc)
    assert manager.get(record.checkpoint_id) == record


def test_completing_records_size_and_path(manager):
    record = save(manager, request(1), size=42)
    assert record.state is CheckpointState.COMPLETE
    assert (record.size_bytes, record.storage_path) == (42, f"run/{record.checkpoint_id}")
    assert manager.get(record.checkpoint_id) == record


def test_a_checkpoint_is_completed_only_once(manager):
    record = save(manager, request(1))
    with pytest.raises(TransitionError, match="from complete to complete"):
        manager.complete(record.checkpoint_id, 1, "elsewhere")


def test_what_does_not_exist_is_named(manager):
    assert manager.get("nothing") is None
    for call in (manager.mark_corrupted, manager.delete, manager.mark_verified):
        with pytest.raises(NotFoundError, match="'nothing'"):
            call("nothing")
    with pytest.raises(NotFoundError, match="'nothing'"):
        manager.complete("nothing", 1, "path")


def test_completing_needs_a_size_and_a_path(manager):
    record = manager.create(request(1))
    with pytest.raises(InvalidInputError, match="size_bytes = -1"):
        manager.complete(record.checkpoint_id, -1, "path")
    with pytest.raises(InvalidInputError, match="storage_path = ''"):
        manager.complete(record.checkpoint_id, 1, "")


def test_records_outlive_the_manager(database_url):
    with CheckpointManager(database=database_url) as first:
        record = save(first, request(3, metrics={"loss": math.nan, "acc": math.inf}))
    with CheckpointManager(database=database_url) as second:
        found = second.get(record.checkpoint_id)
    assert math.isnan(found.metrics["loss"])
    assert found.metrics["acc"] == math.inf
    assert found.created_at == record.created_at


def test_a_database_that_was_passed_in_stays_open(database_url):
    with Database(database_url) as database:
        with CheckpointManager(database=database) as manager:
            save(manager, request(1))
        with CheckpointManager(database=database) as manager:
            assert manager.total_count() == 1


def test_the_latest_is_the_restorable_one_with_the_highest_step(manager):
    save(manager, request(5))
    newest = save(manager, request(9))
    save(manager, request(7))
    manager.create(request(99))
    assert manager.get_latest("run") == newest
    assert manager.get_latest("nobody") is None


def test_a_run_is_listed_oldest_step_first_without_the_deleted(manager):
    third, first = save(manager, request(3)), save(manager, request(1))
    gone = save(manager, request(2))
    save(manager, request(1, run="other"))
    manager.delete(gone.checkpoint_id)
    assert ids(manager.list_for_run("run")) == ids([first, third])


def test_runs_are_summed_up(manager, clock):
    save(manager, request(1), size=10)
    clock.advance(5)
    save(manager, request(8, run="late"), size=7)
    save(manager, request(2, run="late"), size=5)
    late, early = manager.list_runs()
    assert (late.training_run_id, late.checkpoints, late.size_bytes, late.last_step) == (
        "late",
        2,
        12,
        8,
    )
    assert (early.training_run_id, early.last_created_at) == (
        "run",
        clock.utc - timedelta(seconds=5),
    )


class TestAnIncrementalCheckpoint:
    def test_builds_on_the_newest_restorable_one_by_itself(self, manager):
        save(manager, request(1))
        parent = save(manager, request(2))
        save(manager, request(9))
        manager.create(request(3))
        assert manager.create(incremental(5)).parent_id == parent.checkpoint_id

    def test_needs_something_to_build_on(self, manager):
        manager.create(request(1))
        with pytest.raises(ConflictError, match="create a full one first"):
            manager.create(incremental(2))
        assert manager.total_count() == 1

    def test_builds_on_the_parent_that_was_asked_for(self, manager):
        parent = save(manager, request(1))
        save(manager, request(2))
        child = manager.create(incremental(3, parent_id=parent.checkpoint_id))
        assert child.parent_id == parent.checkpoint_id

    def test_refuses_a_parent_of_another_run(self, manager):
        parent = save(manager, request(1, run="other"))
        with pytest.raises(InvalidInputError, match="belongs to run 'other'"):
            manager.create(incremental(3, parent_id=parent.checkpoint_id))

    def test_refuses_a_parent_that_is_after_it(self, manager):
        parent = save(manager, request(5))
        with pytest.raises(InvalidInputError, match="is after"):
            manager.create(incremental(3, parent_id=parent.checkpoint_id))

    def test_refuses_a_parent_that_is_not_complete(self, manager):
        parent = manager.create(request(1))
        with pytest.raises(ConflictError, match="cannot be built on"):
            manager.create(incremental(3, parent_id=parent.checkpoint_id))

    def test_keeps_its_parent_from_being_deleted(self, manager):
        parent = save(manager, request(1))
        child = manager.create(incremental(2))
        with pytest.raises(ConflictError, match=child.checkpoint_id):
            manager.delete(parent.checkpoint_id)
        assert manager.get(parent.checkpoint_id).state is CheckpointState.COMPLETE

    def test_goes_with_its_parent_when_asked_to(self, manager):
        parent = save(manager, request(1))
        child = save(manager, incremental(2))
        grandchild = save(manager, incremental(3))
        gone = manager.delete(parent.checkpoint_id, cascade=True)
        assert gone == (grandchild.checkpoint_id, child.checkpoint_id, parent.checkpoint_id)
        assert manager.list_for_run("run") == ()

    def test_is_corrupted_with_its_parent(self, manager):
        parent = save(manager, request(1))
        child = save(manager, incremental(2))
        grandchild = manager.create(incremental(3))
        bystander = save(manager, request(4))
        marked = manager.mark_corrupted(parent.checkpoint_id, "a flipped bit")
        assert ids(marked) == ids([parent, child, grandchild])
        assert marked[0].note == "a flipped bit"
        assert parent.checkpoint_id in marked[2].note
        assert manager.get_latest("run") == bystander
        with pytest.raises(TransitionError):
            manager.complete(grandchild.checkpoint_id, 1, "path")

    def test_that_was_rewritten_stands_alone(self, manager):
        parent = save(manager, request(1))
        child = save(manager, incremental(2))
        alone = manager.replace_chain(child.checkpoint_id, 500)
        assert (alone.checkpoint_type, alone.parent_id) == (CheckpointType.FULL, None)
        manager.delete(parent.checkpoint_id)
        assert manager.get_latest("run") == alone


def test_a_full_checkpoint_has_no_parent():
    with pytest.raises(InvalidInputError, match="has no parent"):
        request(1, parent_id="x")


def test_a_metric_is_a_number():
    with pytest.raises(InvalidInputError, match="metrics"):
        request(1, metrics={"loss": "low"})


def test_an_emergency_may_build_on_a_parent_or_stand_alone(manager):
    parent = save(manager, request(1))
    emergency = CheckpointType.EMERGENCY
    assert manager.create(request(2, kind=emergency)).parent_id is None
    child = manager.create(request(2, kind=emergency, parent_id=parent.checkpoint_id))
    assert child.parent_id == parent.checkpoint_id


class TestARestorePoint:
    def find(self, manager, **more):
        return manager.find_restore_point(RestoreCriteria(training_run_id="run", **more))

    def test_is_the_newest_by_default(self, manager):
        save(manager, request(1))
        newest = save(manager, incremental(2))
        assert self.find(manager) == newest

    def test_stays_within_the_step_that_was_asked_for(self, manager):
        first = save(manager, request(1))
        save(manager, request(2))
        assert self.find(manager, max_step=1) == first
        assert self.find(manager, max_step=0) is None

    def test_prefers_a_full_one_where_asked_to(self, manager):
        full = save(manager, request(1))
        save(manager, incremental(2))
        assert self.find(manager, prefer_full=True) == full

    def test_may_still_be_in_the_making_where_that_is_allowed(self, manager):
        creating = manager.create(request(1))
        assert self.find(manager) is None
        assert self.find(manager, require_complete=False) == creating

    def test_is_never_above_a_broken_chain(self, manager):
        first = save(manager, request(1))
        second = save(manager, request(2))
        save(manager, incremental(3))
        manager.mark_corrupted(second.checkpoint_id)
        assert self.find(manager) == first

    def test_at_one_step_has_the_shorter_chain(self, manager):
        parent = save(manager, request(1))
        alone = save(manager, request(2))
        save(manager, incremental(2, parent_id=parent.checkpoint_id))
        assert self.find(manager) == alone

    def test_is_explained_by_the_plan(self, manager):
        save(manager, request(1), size=1000)
        save(manager, incremental(2), size=200)
        manager.measurements.record_restore("run", 1, 1000, 0.01)
        plan = manager.restore_plan(RestoreCriteria(training_run_id="run"))
        assert plan.chosen.record.step == 2
        assert (plan.chosen.bytes_to_read, plan.estimated_ms) == (1200, 12)

    def test_has_no_estimate_before_anything_was_measured(self, manager):
        save(manager, request(1))
        plan = manager.restore_plan(RestoreCriteria(training_run_id="run"))
        assert plan.estimated_ms is None
        assert manager.restore_plan(RestoreCriteria(training_run_id="none")).chosen is None


class TestGarbageCollection:
    def test_deletes_what_the_policy_lets_go_and_says_which(self, manager):
        saved = [save(manager, request(step)) for step in range(4)]
        assert manager.gc() == (saved[1].checkpoint_id, saved[0].checkpoint_id)
        assert ids(manager.list_for_run("run")) == ids(saved[2:])

    def test_looks_at_every_run_by_itself(self, manager):
        for run in (f"run-{k:03}" for k in range(70)):
            for step in range(3):
                save(manager, request(step, run=run))
        assert len(manager.gc()) == 70
        assert manager.total_count() == 140

    def test_can_be_confined_to_one_run(self, manager):
        for run in ("a", "b"):
            for step in range(3):
                save(manager, request(step, run=run))
        assert len(manager.gc(training_run_id="a")) == 1
        assert manager.total_count() == 5

    def test_can_be_asked_beforehand(self, manager):
        saved = [save(manager, request(step)) for step in range(3)]
        doomed = [d.checkpoint_id for d in manager.retention() if not d.keep]
        assert doomed == [saved[0].checkpoint_id]
        assert manager.total_count() == 3
        assert manager.gc() == tuple(doomed)

    def test_leaves_a_tombstone_with_the_reason_for_a_while(self, manager, clock):
        saved = [save(manager, request(step)) for step in range(3)]
        manager.gc()
        tombstone = manager.get(saved[0].checkpoint_id)
        assert tombstone.state is CheckpointState.DELETED
        assert tombstone.note == "it is not among the newest 2"
        clock.advance(KEEP_DELETED_SECONDS + 1)
        manager.gc()
        assert manager.get(saved[0].checkpoint_id) is None


class TestDeletingFiles:
    @pytest.fixture
    def removed(self):
        return []

    @pytest.fixture
    def manager(self, database_url, removed):
        def remove(record):
            if record.step in self.stuck:
                raise UnavailableError("the disk is away")
            removed.append(record.step)

        self.stuck = set()
        policy = GcPolicy(max_checkpoints_per_run=1)
        with CheckpointManager(policy, database=database_url, remove_files=remove) as made:
            yield made

    def test_comes_after_the_record_is_gone(self, manager, removed):
        record = save(manager, request(1))
        manager.delete(record.checkpoint_id)
        assert removed == [1]

    def test_that_fails_is_tried_again_and_nothing_is_listed_meanwhile(self, manager, removed):
        record = save(manager, request(1))
        self.stuck = {1}
        manager.delete(record.checkpoint_id)
        assert (removed, manager.list_for_run("run")) == ([], ())
        self.stuck = set()
        manager.gc()
        assert removed == [1]
        manager.gc()
        assert removed == [1]

    def test_starts_with_the_newest_so_that_no_chain_loses_its_bottom_first(self, manager, removed):
        parent = save(manager, request(1))
        save(manager, incremental(2))
        save(manager, incremental(3))
        manager.delete(parent.checkpoint_id, cascade=True)
        assert removed == [3, 2, 1]


def test_metrics_are_compared_in_the_direction_that_was_asked_for(manager):
    values = {1: 0.5, 2: 0.1, 3: math.nan, 4: 0.9}
    for step, loss in values.items():
        save(manager, request(step, metrics={"loss": loss}))
    save(manager, request(5))
    manager.create(request(6, metrics={"loss": 0.0}))

    def steps(threshold, ascending):
        found = manager.find_by_metric("run", "loss", threshold, ascending)
        return [record.step for record in found]

    assert steps(0.9, True) == [2, 1]
    assert steps(0.1, False) == [4, 1]
    assert steps(math.nan, True) == []


def test_count_and_size_leave_out_what_is_deleted(manager):
    assert (manager.total_count(), manager.total_size()) == (0, 0)
    first = save(manager, request(1), size=10)
    save(manager, request(2, run="other"), size=5)
    assert (manager.total_count(), manager.total_size()) == (2, 15)
    manager.delete(first.checkpoint_id)
    assert (manager.total_count(), manager.total_size()) == (1, 5)


def test_a_deleted_checkpoint_stays_deleted(manager):
    record = save(manager, request(1))
    manager.delete(record.checkpoint_id)
    with pytest.raises(TransitionError, match="nothing: it is final"):
        manager.delete(record.checkpoint_id)


def test_a_found_checkpoint_can_be_adopted_but_not_twice(manager):
    record = save(manager, request(1))
    with pytest.raises(AlreadyExistsError, match=record.checkpoint_id):
        manager.adopt(record)
    manager.delete(record.checkpoint_id)
    assert manager.adopt(record) == record
    assert manager.get_latest("run") == record


def test_verification_is_remembered(manager, clock):
    record = save(manager, request(1))
    assert record.verified_at is None
    assert manager.mark_verified(record.checkpoint_id).verified_at == clock.utc
    creating = manager.create(request(2))
    with pytest.raises(ConflictError, match="creating"):
        manager.mark_verified(creating.checkpoint_id)


def test_measurements_feed_the_schedule(manager, clock):
    assert manager.measurements.history("run").save_seconds is None
    for seconds in (1.0, 3.0, 2.0):
        manager.measurements.record_save("run", 100, seconds)
    manager.measurements.record_failure("run")
    manager.measurements.record_failure("other")
    clock.advance(50)
    history = manager.measurements.history("run")
    assert (history.save_seconds, history.failures, history.observed_seconds) == (2.0, 1, 50.0)
    assert history.progress(5, 9.0, 1, 2.0).save_seconds == 2.0
    with pytest.raises(InvalidInputError, match="seconds = -1"):
        manager.measurements.record_save("run", 1, -1)


def test_a_run_without_restores_borrows_the_rates_of_others(manager):
    manager.measurements.record_restore("other", 1, 1000, 0.001)
    assert manager.measurements.restore_rates("run").bytes_per_ms == pytest.approx(1000)
