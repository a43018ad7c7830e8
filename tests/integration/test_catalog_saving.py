"""The catalog joined to real files: save, restore from any link, sweep, rebuild, verify, compact."""

import signal
import subprocess
import sys
import textwrap
import threading
from datetime import UTC, datetime, timedelta

import pytest
import torch
from tests.store_files import orphans

from tensorforge.catalog import (
    CheckpointManager,
    CheckpointState,
    CheckpointType,
    GcPolicy,
    IncrementPolicy,
    RestoreCriteria,
    RunCheckpoints,
    rebuild,
    remover,
    sweep,
    verify,
)
from tensorforge.checkpoint import DistributedCheckpoint, InMemoryRanks, SingleProcess
from tensorforge.errors import CheckpointError, ConflictError, NotFoundError
from tensorforge.storage.local_store import LocalStore
from tensorforge.storage.memory_store import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore::tensorforge.checkpoint.StaleSaveWarning")


class State:
    """A state that a test can set tensor by tensor."""

    def __init__(self, **tensors):
        self.tensors = tensors

    def state_dict(self):
        return dict(self.tensors)

    def load_state_dict(self, state):
        for name, tensor in state.items():
            self.tensors[name].copy_(tensor)

    def copy(self):
        return State(**{name: tensor.clone() for name, tensor in self.tensors.items()})

    def blank(self):
        return State(**{name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()})

    def __eq__(self, other):
        return all(torch.equal(self.tensors[name], other.tensors[name]) for name in self.tensors)

    __hash__ = None


def make_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return State(
        backbone=torch.randn(300, 1000, generator=generator),
        head=torch.randn(100, 100, generator=generator),
        half=torch.randn(64, 64, generator=generator).to(torch.bfloat16),
        count=torch.tensor(seed),
        empty=torch.empty(0, 3),
    )


def step_on(state, seed, names=("head", "count")):
    torch.manual_seed(seed)
    for name in names:
        tensor = state.tensors[name]
        tensor.add_(torch.ones_like(tensor) if tensor.dtype == torch.int64 else 1e-3)


@pytest.fixture
def store(tmp_path):
    made = LocalStore(tmp_path / "blobs")
    yield made
    made.close()


@pytest.fixture
def manager(store, tmp_path):
    policy = GcPolicy(max_checkpoints_per_run=2)
    with CheckpointManager(policy, database=tmp_path / "c.db", remove_files=remover(store)) as made:
        yield made


@pytest.fixture
def runs(manager, store):
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    with RunCheckpoints(
        manager, checkpoint, "a run/1", increments=IncrementPolicy(max_chain=4)
    ) as made:
        yield made


def occupied(store):
    return sum(blob.size for blob in store.list())


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


def test_a_state_that_did_not_change_writes_a_manifest_and_nothing_else(runs, store):
    state = make_state()
    runs.save(state, epoch=0, step=0)
    files = {blob.key for blob in store.list()}
    again = runs.save(state, epoch=0, step=1)
    assert {blob.key for blob in store.list()} - files == {f"{again.storage_path}.metadata.json"}
    assert runs.restore(state.blank()).record == again


def test_content_that_moved_to_another_tensor_is_found(runs):
    state = make_state()
    runs.save(state, epoch=0, step=0)
    renamed = State(**{f"new.{name}": tensor for name, tensor in state.tensors.items()})
    runs.save(renamed, epoch=0, step=1)
    assert runs.last_increment.tally.complete == 0
    found = renamed.blank()
    runs.restore(found)
    assert found == renamed


def test_tensors_may_come_go_and_change_shape_and_type(runs):
    state = make_state()
    runs.save(state, epoch=0, step=0)
    state.tensors["head"] = state.tensors["head"].double()
    state.tensors["backbone"] = state.tensors["backbone"][:200].contiguous() + 1
    state.tensors["extra"] = torch.arange(10)
    del state.tensors["half"]
    runs.save(state, epoch=0, step=1)
    found = state.blank()
    runs.restore(found)
    assert found == state


def test_a_full_chain_is_followed_by_compaction_and_what_is_below_may_go(runs, manager, store):
    state, records = make_state(), []
    for step in range(4):
        step_on(state, step)
        records.append(runs.save(state, epoch=0, step=step))
    runs.wait()
    last = manager.get(records[-1].checkpoint_id)
    assert (last.checkpoint_type, last.parent_id) == (CheckpointType.FULL, None)
    assert runs.restore(found := state.blank()).record == last
    assert found == state
    step_on(state, 9)
    child = runs.save(state, epoch=0, step=9)
    assert child.parent_id == last.checkpoint_id
    gone = manager.gc()
    assert set(gone) == {record.checkpoint_id for record in records[:3]}
    assert orphans(store) == []
    assert occupied(store) == manager.total_size()
    runs.restore(found := state.blank())
    assert found == state


def test_only_the_last_of_a_chain_is_compacted(runs):
    state = make_state()
    runs.save(state, epoch=0, step=0)
    step_on(state, 1)
    middle = runs.save(state, epoch=0, step=1)
    step_on(state, 2)
    runs.save(state, epoch=0, step=2)
    with pytest.raises(ConflictError, match="not the last of its chain"):
        runs.compact(middle.checkpoint_id)
    assert runs.restore(found := state.blank()).record.step == 2
    assert found == state


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


def flip_a_byte(store, record):
    path = next((store.root / record.storage_path).glob("rank-*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


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


CRASH = textwrap.dedent(
    """
    import os, sys, signal, torch
    from tensorforge.catalog import CheckpointManager, IncrementPolicy, RunCheckpoints, remover
    from tensorforge.checkpoint import DistributedCheckpoint, SingleProcess
    from tensorforge.storage.local_store import LocalStore
    from tensorforge.storage.system_calls import SystemCalls

    class State(dict):
        def state_dict(self): return dict(self)

    folder, crash_at = sys.argv[1], sys.argv[2]
    store = LocalStore(folder + "/blobs")
    manager = CheckpointManager(database=folder + "/c.db", remove_files=remover(store))
    runs = RunCheckpoints(
        manager, DistributedCheckpoint(SingleProcess(), store), "run", increments=IncrementPolicy()
    )
    state = State(w=torch.arange(200_000.0))
    runs.save(state, epoch=0, step=0)
    state["w"] += 1

    def die(*_a, **_k):
        os.kill(os.getpid(), signal.SIGKILL)

    if crash_at == "before the files":
        store.open_writer = die
    elif crash_at == "before the manifest":
        create = store.create
        store.create = lambda key, data: die() if "metadata" in key else create(key, data)
    elif crash_at == "before the record":
        manager.complete = die
    runs.save(state, epoch=0, step=1)
    """
)


@pytest.mark.parametrize(
    ("crash_at", "completed"),
    [("before the files", False), ("before the manifest", False), ("before the record", True)],
)
def test_a_crash_in_a_save_is_settled_at_the_next_start(tmp_path, crash_at, completed):
    done = subprocess.run(
        [sys.executable, "-c", CRASH, str(tmp_path), crash_at], capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    store = LocalStore(tmp_path / "blobs")
    with (
        CheckpointManager(database=tmp_path / "c.db", remove_files=remover(store)) as manager,
        RunCheckpoints(manager, DistributedCheckpoint(SingleProcess(), store), "run") as runs,
    ):
        (unfinished,) = [
            r for r in manager.list_for_run("run") if r.state is CheckpointState.CREATING
        ]
        report = runs.sweep()
        ids = (unfinished.checkpoint_id,)
        assert (report.completed, report.deleted) == ((ids, ()) if completed else ((), ids))
        found = State(w=torch.zeros(200_000))
        assert runs.restore(found).record.step == (1 if completed else 0)
        assert torch.equal(found.tensors["w"], torch.arange(200_000.0) + completed)
        assert orphans(store) == []
        assert occupied(store) == manager.total_size()
    store.close()


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


TRAINING = textwrap.dedent(
    """
    import sys, time, torch
    from tensorforge.catalog import CheckpointManager, EmergencySaves, IncrementPolicy, RunCheckpoints
    from tensorforge.checkpoint import DistributedCheckpoint, SingleProcess
    from tensorforge.storage.local_store import LocalStore

    class State(dict):
        def state_dict(self): return dict(self)

    store = LocalStore(sys.argv[1] + "/blobs")
    with CheckpointManager(database=sys.argv[1] + "/c.db") as manager:
        runs = RunCheckpoints(
            manager, DistributedCheckpoint(SingleProcess(), store), "run", increments=IncrementPolicy()
        )
        state = State(w=torch.zeros(50_000), frozen=torch.arange(50_000.0))
        runs.save(state, epoch=0, step=0)
        step = 0
        with EmergencySaves(lambda: runs.emergency(state, epoch=0, step=step)) as emergency:
            while True:
                state["w"] += 1
                step += 1
                print(step, flush=True)
                emergency.check()
    """
)


def test_sigterm_leaves_an_emergency_checkpoint_of_the_last_step(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if int(line) == 5:
            process.send_signal(signal.SIGTERM)
            break
    last = int((process.stdout.read().split() or ["5"])[-1])
    process.stdout.close()
    assert process.wait() == 143
    store = LocalStore(tmp_path / "blobs")
    with CheckpointManager(database=tmp_path / "c.db") as manager:
        runs = RunCheckpoints(manager, DistributedCheckpoint(SingleProcess(), store), "run")
        found = State(w=torch.ones(50_000), frozen=torch.zeros(50_000))
        record = runs.restore(found).record
        assert (record.checkpoint_type, record.step) == (CheckpointType.EMERGENCY, last)
        assert record.parent_id is not None
        assert torch.equal(found.tensors["w"], torch.full((50_000,), float(last)))
        assert torch.equal(found.tensors["frozen"], torch.arange(50_000.0))
    store.close()
