"""The catalog joined to real files: save, restore from any checkpoint of a chain."""

import threading

import pytest
from tests.store_files import orphans
from tests.unit.catalog.run_states import State, flip_a_byte, make_state, occupied, step_on

from tensorforge.catalog import (
    CheckpointManager,
    CheckpointState,
    CheckpointType,
    IncrementPolicy,
    RestoreCriteria,
    RunCheckpoints,
    remover,
)
from tensorforge.checkpoint import DistributedCheckpoint, InMemoryRanks
from tensorforge.errors import CheckpointError, ConflictError, NotFoundError
from tensorforge.storage.memory_store import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore::tensorforge.checkpoint.StaleSaveWarning")


def test_a_save_is_recorded_verified_and_complete(runs, manager, store):
    record = runs.save(make_state(), epoch=1, step=10, metrics={"loss": 0.5})
    assert record == manager.get(record.checkpoint_id)
    assert record.state is CheckpointState.COMPLETE
    assert (record.epoch, record.step, dict(record.metrics)) == (1, 10, {"loss": 0.5})
    assert record.verified_at is not None
    assert record.size_bytes == occupied(store) == manager.total_size()
    assert orphans(store) == []


def test_the_first_save_is_full_and_the_next_ones_build_on_it(runs):
    state = make_state()
    records = []
    for number in range(3):
        step_on(state, number)
        records.append(runs.save(state, epoch=0, step=number))
    assert [r.checkpoint_type.value for r in records] == ["full", "incremental", "incremental"]
    assert records[2].parent_id == records[1].checkpoint_id
    assert records[2].size_bytes < records[0].size_bytes / 10


def test_every_link_of_a_chain_is_restored_exactly(runs):
    state, saved = make_state(), {}
    for step in range(4):
        step_on(state, step, [("head", "count"), ("half",), ("backbone", "head"), ()][step])
        runs.save(state, epoch=0, step=step)
        saved[step] = state.copy()
    for step, expected in saved.items():
        found = state.blank()
        criteria = RestoreCriteria(training_run_id="a run/1", max_step=step)
        restored = runs.restore(found, criteria=criteria)
        assert restored.record.step == step
        assert found == expected


def test_the_longest_chain_ends_in_a_full_checkpoint_where_nothing_is_compacted(runs, manager):
    state = make_state()
    for step in range(4):
        step_on(state, step)
        runs.save(state, epoch=0, step=step)
        runs._compaction, compaction = None, runs._compaction
        if compaction is not None:
            compaction.join()
    assert max(manager.chain_length(r.checkpoint_id) for r in manager.list_for_run("a run/1")) <= 4


def test_garbage_collection_keeps_what_a_kept_one_builds_on(runs, manager):
    state = make_state()
    for step in range(3):
        step_on(state, step)
        runs.save(state, epoch=0, step=step)
    assert manager.gc() == ()
    runs.restore(found := state.blank())
    assert found == state


def test_a_restore_passes_over_damage_and_remembers_it(runs, manager, store):
    state = make_state()
    good = state.copy()
    first = runs.save(state, epoch=0, step=0)
    state.tensors["backbone"].mul_(-1.5)
    second = runs.save(state, epoch=0, step=1, checkpoint_type=CheckpointType.FULL)
    flip_a_byte(store, second)
    restored = runs.restore(found := state.blank())
    assert restored.record == first
    assert restored.damaged == (second.checkpoint_id,)
    assert found == good
    assert manager.get(second.checkpoint_id).state is CheckpointState.CORRUPTED


def test_a_run_without_checkpoints_has_nothing_to_restore(runs):
    with pytest.raises(NotFoundError, match="a run/1"):
        runs.restore(make_state())


def test_restores_are_measured_and_estimated(runs, manager):
    state = make_state()
    runs.save(state, epoch=0, step=0)
    runs.restore(state.blank())
    plan = manager.restore_plan(RestoreCriteria(training_run_id="a run/1"))
    assert plan.rates.measurements == 1
    assert plan.estimated_ms >= 1
    assert manager.measurements.history("a run/1").save_seconds > 0


class Failing(State):
    def state_dict(self):
        raise RuntimeError("the state is not ready")


def test_a_save_that_fails_leaves_neither_a_record_nor_files(runs, manager, store):
    runs.save(make_state(), epoch=0, step=0)
    before = occupied(store)
    with pytest.raises(CheckpointError, match="not ready"):
        runs.save(Failing(), epoch=0, step=1)
    assert len(manager.list_for_run("a run/1")) == 1
    assert occupied(store) == before
    assert orphans(store) == []


def test_an_incremental_save_needs_something_to_build_on(runs):
    with pytest.raises(ConflictError, match="no parent for an incremental"):
        runs.save(make_state(), epoch=0, step=0, checkpoint_type=CheckpointType.INCREMENTAL)


def test_a_parent_whose_manifest_is_gone_is_noticed_and_a_full_one_is_written(runs, manager, store):
    state = make_state()
    first = runs.save(state, epoch=0, step=0)
    store.delete(f"{first.storage_path}.metadata.json")
    second = runs.save(state, epoch=0, step=1)
    assert second.checkpoint_type is CheckpointType.FULL
    assert manager.get(first.checkpoint_id).state is CheckpointState.CORRUPTED


def on_ranks(world_size, store, manager, work):
    ranks, outcomes = InMemoryRanks(world_size), {}

    def run(rank):
        coordinator = ranks.coordinator(rank)
        runs = RunCheckpoints(
            manager if rank == 0 else None,
            DistributedCheckpoint(coordinator, store, timeout=30),
            "run",
            coordinator=coordinator,
            increments=IncrementPolicy(),
        )
        try:
            outcomes[rank] = work(runs, rank)
        except Exception as error:  # noqa: BLE001
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_increments_of_several_ranks_are_restored_by_another_number_of_ranks():
    store = MemoryStore("ranks")
    state = make_state()
    with CheckpointManager(remove_files=remover(store)) as manager:

        def save_two(runs, rank):
            mine = state.copy()
            runs.save(mine, epoch=0, step=0)
            step_on(mine, 1, ("backbone", "count"))
            return runs.save(mine, epoch=0, step=1)

        outcomes = on_ranks(3, store, manager, save_two)
        assert outcomes[0] == outcomes[1] == outcomes[2], outcomes
        expected = state.copy()
        step_on(expected, 1, ("backbone", "count"))

        def load(runs, rank):
            found = state.blank()
            runs.restore(found)
            return found

        for world_size in (1, 2):
            for found in on_ranks(world_size, store, manager, load).values():
                assert found == expected


def test_a_save_in_the_background_lets_the_state_change_at_once(runs, manager):
    state = make_state()
    runs.save(state, epoch=0, step=0)
    step_on(state, 1)
    expected = state.copy()
    pending = runs.async_save(state, epoch=0, step=1, metrics={"loss": 1.0})
    step_on(state, 2)
    record = pending.result(timeout=60)
    assert pending.is_done
    assert record == manager.get(pending.record.checkpoint_id)
    assert (record.state, record.checkpoint_type.value) == (CheckpointState.COMPLETE, "incremental")
    assert runs.restore(found := state.blank()).record == record
    assert found == expected


def test_saves_in_the_background_follow_one_another(runs, manager):
    state = make_state()
    for step in range(4):
        step_on(state, step)
        runs.async_save(state, epoch=0, step=step)
    runs.wait()
    assert [r.state for r in manager.list_for_run("a run/1")] == [CheckpointState.COMPLETE] * 4
    runs.restore(found := state.blank())
    assert found == state


def test_a_failure_in_the_background_is_raised_by_the_next_call(runs, manager, store, monkeypatch):
    state = make_state()
    runs.save(state, epoch=0, step=0)
    step_on(state, 1)

    def fail(*_args, **_kwargs):
        raise CheckpointError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store, "open_writer", fail)
        runs.async_save(state, epoch=0, step=1)
        with pytest.raises(CheckpointError, match="the disk is full"):
            runs.save(state, epoch=0, step=2)
    assert len(manager.list_for_run("a run/1")) == 1
    assert orphans(store) == []
    runs.save(state, epoch=0, step=2)


def test_an_emergency_builds_on_the_last_checkpoint(runs):
    state = make_state()
    runs.save(state, epoch=0, step=0)
    step_on(state, 1)
    record = runs.emergency(state, epoch=0, step=1)
    assert record.checkpoint_type is CheckpointType.EMERGENCY
    assert record.parent_id is not None
    assert runs.restore(found := state.blank()).record == record
    assert found == state
