"""Any interleaving of saves, damage, deletion, collection, compaction, crashes and rebuilds on real files.

The model is a dictionary from checkpoint id to a copy of the state that was saved.
"""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.store_files import orphans

from tensorforge.catalog import (
    CheckpointManager,
    CheckpointState,
    CheckpointType,
    GcPolicy,
    IncrementPolicy,
    RestoreCriteria,
    RunCheckpoints,
    queries,
    rebuild,
    remover,
    sweep,
    verify,
)
from tensorforge.catalog.chains.chains import is_restorable
from tensorforge.catalog.chains.retention import best_by_metric
from tensorforge.catalog.stored_records import prefix_of
from tensorforge.checkpoint import DistributedCheckpoint, LoadOptions, SingleProcess, store_index
from tensorforge.errors import ConflictError, UnavailableError
from tensorforge.processes import ProcessIdentity
from tensorforge.storage.database import Database
from tensorforge.storage.memory_store import MemoryStore

pytestmark = [
    pytest.mark.filterwarnings("ignore::tensorforge.checkpoint.StaleSaveWarning"),
    # A crash may hit the thread that compacts; here only the thread ends, not the process.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]

RUN = "run"
POLICY = GcPolicy(max_checkpoints_per_run=2, keep_best_n=1)
INCREMENTS = IncrementPolicy(max_chain=3)
DEAD = ProcessIdentity.of(1 << 30).to_text()


class Crash(BaseException):
    """Stands in for the end of the process: nothing catches it."""


class Flaky:
    """A store that can be told to fail for good at its n-th write from now."""

    def __init__(self, store):
        self._store = store
        self.writes_left = None

    def __getattr__(self, name):
        return getattr(self._store, name)

    def _count(self):
        if self.writes_left is not None:
            if self.writes_left <= 0:
                raise Crash
            self.writes_left -= 1

    def write(self, key, data):
        self._count()
        return self._store.write(key, data)

    def create(self, key, data):
        self._count()
        return self._store.create(key, data)

    def open_writer(self, key, size_hint=None):
        self._count()
        return self._store.open_writer(key, size_hint)

    def delete(self, key):
        self._count()
        return self._store.delete(key)


class State(dict):
    def state_dict(self):
        return dict(self)

    def load_state_dict(self, state):
        for name, tensor in state.items():
            self[name].copy_(tensor)


def fresh():
    return State(big=torch.arange(3000.0), small=torch.zeros(10), table=torch.zeros(64, 8))


class FilesMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.database = Database()
        self.store = Flaky(MemoryStore("files"))
        self.state = fresh()
        self.saved = {}
        self.step = 0
        self.start()

    def start(self):
        """A process begins: opens the catalog and settles what an earlier one left."""
        self.store.writes_left = None
        self.manager = CheckpointManager(
            POLICY,
            database=self.database,
            remove_files=remover(self.store),
        )
        checkpoint = DistributedCheckpoint(SingleProcess(), self.store)
        self.runs = RunCheckpoints(self.manager, checkpoint, RUN, increments=INCREMENTS)

    def teardown(self):
        self.runs.close()
        self.database.close()

    def records(self):
        return {record.checkpoint_id: record for record in self.manager.list_for_run(RUN)}

    def remember(self, checkpoint_id):
        self.saved[checkpoint_id] = {name: t.clone() for name, t in self.state.items()}

    def pick(self, data, *states):
        names = sorted(n for n, r in self.records().items() if r.state in states)
        return data.draw(st.sampled_from(names)) if names else None

    @rule(
        names=st.sets(st.sampled_from(["big", "small", "table"])),
        row=st.integers(0, 63),
        kind=st.sampled_from([None, None, CheckpointType.FULL, CheckpointType.EMERGENCY]),
        loss=st.sampled_from([1.0, 2.0, float("nan")]),
    )
    def train_and_save(self, names, row, kind, loss):
        self.train(names, row)
        record = self.runs.save(
            self.state, epoch=0, step=self.step, checkpoint_type=kind, metrics={"loss": loss}
        )
        self.runs.wait()
        self.remember(record.checkpoint_id)

    def train(self, names, row):
        self.step += 1
        if "big" in names:
            self.state["big"] += 1e-3
        if "small" in names:
            self.state["small"] += self.step
        if "table" in names:
            self.state["table"][row] -= 0.5

    @rule(writes=st.integers(0, 12), names=st.sets(st.sampled_from(["big", "small"])))
    def crash_in_a_save(self, writes, names):
        self.train(names, 0)
        self.store.writes_left = writes
        before = set(self.records())
        try:
            self.runs.save(self.state, epoch=0, step=self.step, metrics={"loss": 1.0})
            self.runs.wait()
        except (Crash, UnavailableError):
            pass
        self.recover(set(self.records()) - before)

    def recover(self, new):
        self.start()
        for name in new:
            self.end_the_process_of(name)
        for blob in list(self.store.list()):
            if blob.key.endswith(".compacting.json"):
                self.store.write(blob.key, DEAD.encode())
        sweep(self.manager, self.store)
        for name in new & set(self.records()):
            self.remember(name)

    def end_the_process_of(self, name):
        """The process lives on in a test; its record says that it does not, and so does its claim."""
        with self.manager._database.write() as connection:
            record = queries.existing(connection, name)
            if record.state is CheckpointState.CREATING:
                queries.update(connection, record, note=DEAD)
        claim = f"{prefix_of(RUN, name)}.saving.json"
        committed = {blob.key for blob in self.store.list()}
        if claim in committed and f"{prefix_of(RUN, name)}.metadata.json" not in committed:
            store_index.delete_files(self.store, prefix_of(RUN, name))
        self.store.delete(claim)

    @rule(data=st.data(), cascade=st.booleans())
    def delete(self, data, cascade):
        name = self.pick(data, *CheckpointState)
        if name is not None:
            try:
                self.manager.delete(name, cascade=cascade)
            except ConflictError:
                assert not cascade

    @rule()
    def collect(self):
        known = self.records()
        intact = [r for n, r in known.items() if is_restorable(known, n)]
        self.manager.gc()
        left = self.records()
        for best in best_by_metric(intact, POLICY):
            assert best.checkpoint_id in left
        if intact:
            assert max(intact, key=lambda r: r.recency).checkpoint_id in left

    @rule(data=st.data())
    def damage_and_verify(self, data):
        name = self.pick(data, CheckpointState.COMPLETE)
        if name is None:
            return
        own = [b for b in self.store.list(f"{prefix_of(RUN, name)}/") if b.size]
        if own:
            content = bytearray(self.store.read(own[0].key))
            content[data.draw(st.integers(0, len(content) - 1))] ^= 0x10
            self.store.write(own[0].key, bytes(content))
        assert verify(self.manager, self.store, name).is_valid == (not own)

    @rule(data=st.data())
    def verify_one(self, data):
        name = self.pick(data, CheckpointState.COMPLETE)
        if name is not None:
            assert verify(self.manager, self.store, name).is_valid

    @rule(data=st.data())
    def compact_one(self, data):
        name = self.pick(data, CheckpointState.COMPLETE)
        if name is not None:
            try:
                assert self.runs.compact(name).is_self_contained
            except ConflictError:
                assert any(r.parent_id == name for r in self.records().values())

    @rule()
    def lose_the_database_and_rebuild(self):
        before = self.records()
        self.database.close()
        self.database = Database()
        self.start()
        rebuild(self.manager, self.store)
        after = self.records()
        assert set(after) == set(before)
        for name, record in before.items():
            assert (after[name].parent_id, after[name].step) == (record.parent_id, record.step)
            was_damaged = record.state is CheckpointState.CORRUPTED
            if was_damaged and self.manager.get(name).state is CheckpointState.COMPLETE:
                verify(self.manager, self.store, name)  # only reading it all finds this damage

    @invariant()
    def every_restorable_checkpoint_is_restored_exactly(self):
        known = self.records()
        for name, record in known.items():
            if is_restorable(known, name):
                found = fresh()
                self.runs._checkpoint.load(
                    found, options=LoadOptions(checkpoint_prefix=record.storage_path)
                )
                for key, tensor in self.saved[name].items():
                    assert torch.equal(found[key], tensor), (name, key)

    @invariant()
    def no_file_is_an_orphan_and_sizes_add_up(self):
        assert orphans(self.store) == []
        assert self.manager.total_size() == sum(blob.size for blob in self.store.list())

    @invariant()
    def the_restore_point_is_the_newest_restorable(self):
        known = self.records()
        found = self.manager.find_restore_point(RestoreCriteria(training_run_id=RUN))
        steps = [r.step for n, r in known.items() if is_restorable(known, n)]
        assert (found.step if found else None) == max(steps, default=None)


FilesMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=14, deadline=None)
TestFiles = FilesMachine.TestCase
