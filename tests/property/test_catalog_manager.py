"""Any interleaving of catalog operations agrees with a model that is a dictionary."""

from dataclasses import replace
from datetime import timedelta

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensorforge.catalog import (
    CheckpointManager,
    CheckpointState,
    CheckpointType,
    CreateCheckpointRequest,
    GcPolicy,
    RestoreCriteria,
    decide_retention,
)
from tensorforge.catalog.chains.chains import is_restorable, validate_checkpoint
from tensorforge.catalog.chains.restore import rank_candidates
from tensorforge.errors import ConflictError
from tensorforge.testing.clock import ManualClock

POLICY = GcPolicy(
    max_checkpoints_per_run=3, max_age_seconds=50, keep_best_n=2, abandoned_after_seconds=40
)
RUNS = ["a", "b"]


class CatalogMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.clock = ManualClock()
        self.files = set()
        self.disk_is_away = False
        self.manager = CheckpointManager(
            POLICY, remove_files=self.remove, clock=lambda: self.clock.utc
        )
        self.model = {}

    def teardown(self):
        self.manager.close()

    def remove(self, record):
        if self.disk_is_away:
            raise ConflictError("the disk is away")
        self.files.discard(record.checkpoint_id)

    def live(self, run=None):
        return {
            name: record
            for name, record in self.model.items()
            if record.state is not CheckpointState.DELETED and run in (None, record.training_run_id)
        }

    def pick(self, data, *states):
        names = sorted(n for n, r in self.model.items() if r.state in states)
        return data.draw(st.sampled_from(names)) if names else None

    def children(self, name):
        return [record for record in self.live().values() if record.parent_id == name]

    def mark_deleted(self, names):
        for name in names:
            self.model[name] = replace(self.model[name], state=CheckpointState.DELETED)

    @rule(
        run=st.sampled_from(RUNS),
        step=st.integers(0, 9),
        kind=st.sampled_from(CheckpointType),
        loss=st.sampled_from([0.5, 1.0, float("nan")]),
    )
    def create(self, run, step, kind, loss):
        asked = CreateCheckpointRequest(
            training_run_id=run, epoch=0, step=step, checkpoint_type=kind, metrics={"loss": loss}
        )
        known = self.live(run)
        possible = any(r.step <= step and is_restorable(known, n) for n, r in known.items())
        if kind is CheckpointType.INCREMENTAL and not possible:
            with pytest.raises(ConflictError):
                self.manager.create(asked)
            return
        record = self.manager.create(asked)
        self.model[record.checkpoint_id] = record
        self.files.add(record.checkpoint_id)

    @rule(data=st.data(), size=st.integers(0, 9), verified=st.booleans())
    def complete(self, data, size, verified):
        name = self.pick(data, CheckpointState.CREATING)
        if name is not None:
            at = self.clock.utc if verified else None
            self.model[name] = self.manager.complete(name, size, name, verified_at=at)

    @rule(data=st.data())
    def corrupt(self, data):
        name = self.pick(data, CheckpointState.CREATING, CheckpointState.COMPLETE)
        if name is not None:
            expected = [name]
            for each in expected:
                usable = (CheckpointState.CREATING, CheckpointState.COMPLETE)
                expected += [c.checkpoint_id for c in self.children(each) if c.state in usable]
            marked = {record.checkpoint_id: record for record in self.manager.mark_corrupted(name)}
            assert set(marked) == set(expected)
            self.model |= marked

    @rule(data=st.data(), cascade=st.booleans())
    def delete(self, data, cascade):
        name = self.pick(data, *set(CheckpointState) - {CheckpointState.DELETED})
        if name is None:
            return
        if not cascade and any(
            child.state is not CheckpointState.CORRUPTED for child in self.children(name)
        ):
            with pytest.raises(ConflictError):
                self.manager.delete(name)
        else:
            self.mark_deleted(self.manager.delete(name, cascade=cascade))

    @rule()
    def collect(self):
        expected = {
            decision.checkpoint_id
            for run in RUNS
            for decision in decide_retention(self.live(run).values(), POLICY, self.clock.utc)
            if not decision.keep
        }
        gone = self.manager.gc()
        assert set(gone) == expected
        assert len(gone) == len(expected)
        self.mark_deleted(gone)

    @rule(seconds=st.integers(1, 30))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @rule()
    def the_disk_goes_away_or_comes_back(self):
        self.disk_is_away = not self.disk_is_away

    @precondition(lambda self: not self.disk_is_away)
    @rule()
    def no_files_are_orphans_once_the_disk_is_back(self):
        self.manager.remove_deleted_files()
        assert self.files == set(self.live())

    @invariant()
    def it_lists_what_the_model_lists(self):
        for run in RUNS:
            listed = {r.checkpoint_id: r for r in self.manager.list_for_run(run)}
            assert set(listed) == set(self.live(run))
            for name, record in listed.items():
                assert record.state is self.model[name].state
        assert self.manager.total_count() == len(self.live())
        assert self.manager.total_size() == sum(r.size_bytes for r in self.live().values())

    @invariant()
    def it_restores_what_the_model_restores(self):
        for run in RUNS:
            known = self.live(run)
            criteria = RestoreCriteria(training_run_id=run)
            ranked = rank_candidates(known, criteria)
            best = next((c.record for c in ranked if not c.score.refusal), None)
            found = self.manager.find_restore_point(criteria)
            assert (found and found.checkpoint_id) == (best and best.checkpoint_id)
            newest = max(
                (r for n, r in known.items() if is_restorable(known, n)),
                key=lambda r: r.recency,
                default=None,
            )
            latest = self.manager.get_latest(run)
            assert (latest and latest.checkpoint_id) == (newest and newest.checkpoint_id)

    @invariant()
    def every_complete_one_is_consistent_and_its_files_exist(self):
        for run in RUNS:
            known = self.live(run)
            for name, record in known.items():
                if record.state is CheckpointState.COMPLETE:
                    validate_checkpoint(record, known)
                    assert name in self.files


CatalogMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=timedelta(seconds=30)
)
TestCatalog = CatalogMachine.TestCase
