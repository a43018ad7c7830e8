"""Checkpoints of a run: saved by schedule, in the background, with a record in the catalog; and restoring.

The state is the same on all members, so rank 0 saves it alone and no member waits for another. If rank 0 dies
while it saves, there is no checkpoint of that step; the next rank 0 goes on with the schedule. Files and
records belong to the catalog's `RunCheckpoints`; the run's position in its data is extra state of a checkpoint.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tensorforge.catalog import (
    CheckpointManager,
    CheckpointSchedule,
    CheckpointState,
    CheckpointType,
    GcPolicy,
    IncrementPolicy,
    PendingSave,
    Restored,
    RunCheckpoints,
    TrainingProgress,
    rebuild,
)
from tensorforge.catalog.checkpoint_location import CheckpointLocation
from tensorforge.catalog.stored_records import OLD_BOOKKEEPING
from tensorforge.checkpoint.api import DistributedCheckpoint
from tensorforge.checkpoint.options import LoadOptions, SaveOptions
from tensorforge.checkpoint.ranks.coordinators import SingleProcess
from tensorforge.environment import RUN_DIR
from tensorforge.errors import (
    CheckpointError,
    CheckpointErrorType,
    ConfigurationError,
    IntegrityError,
    NotFoundError,
    TensorForgeError,
)
from tensorforge.storage.opening import open_store
from tensorforge.train.loop.flat_state import empty_like_header, unflatten
from tensorforge.train.loop.training_state import TrainingState
from tensorforge.train.run_log import RunLog

if TYPE_CHECKING:
    from tensorforge.train.evaluation import Evaluation

log = logging.getLogger(__name__)

EVALUATION = "evaluation/"
"""What the names of an evaluation's metrics begin with in a checkpoint's record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """Where and when a run is saved.

    `location`: a folder or the URL of an object store. `schedule`: when to save. `retention`: which checkpoints
    are kept; its `metric_key` is a metric of the training ("loss") or the evaluation ("evaluation/accuracy").
    `run_id`: the run's name in the catalog; runs that share a location or a catalog have different ones.
    `catalog`: the URL or path of the catalog's database; by default a file in the folder, and for an object
    store none: the records are then made from the manifests. `resume`: whether a run that starts begins with
    the newest intact checkpoint. `increments`: save only what changed since the last checkpoint.
    """

    location: str | Path
    schedule: CheckpointSchedule = field(
        default_factory=lambda: CheckpointSchedule(every_seconds=600.0)
    )
    retention: GcPolicy = field(default_factory=GcPolicy)
    run_id: str = "default"
    catalog: str | Path | None = None
    resume: bool = True
    increments: IncrementPolicy | None = None

    def require_known_metric(self, metrics: Sequence[str], *, has_evaluation: bool) -> None:
        """`ConfigurationError` if the retention compares a metric that the run will never have.

        `metrics` are the names of the training's metrics.
        """
        key = self.retention.metric_key
        if not self.retention.keep_best_n or key in metrics:
            return
        if has_evaluation and key.startswith(EVALUATION):
            return
        known = ", ".join([*metrics, *([f"{EVALUATION}NAME"] if has_evaluation else [])])
        raise ConfigurationError("metric_key", key, f"must be a metric of this run: {known}")


@dataclass(frozen=True, slots=True)
class _Opened:
    """The store, the catalog, and the run's checkpoints in both."""

    checkpoint: DistributedCheckpoint
    manager: CheckpointManager
    runs: RunCheckpoints

    def close(self) -> None:
        try:
            self.runs.close()
            self.checkpoint.close()
        finally:
            self.manager.close()


class Checkpointer:
    """Saves and restores a run by its plan. Each worker has one; only rank 0's saves.

    If an evaluation is due after a step, the checkpoint of
    that step waits for it, so that its record has the evaluation's results.
    """

    def __init__(
        self,
        plan: CheckpointPlan,
        run_log: RunLog,
        *,
        evaluation: Evaluation | None = None,
    ) -> None:
        self.plan = plan
        self.location = CheckpointLocation.of(plan.location, plan.catalog, plan.run_id)
        self._run_log = run_log
        self._evaluation = evaluation
        self._opened: _Opened | None = None
        self._pending: PendingSave | None = None
        self._awaits_evaluation = False
        self._last_step = -1
        """The step after which a worker saved last, as far as this worker knows."""
        self._saved_step = -1
        """The step of the last checkpoint that is known to be complete."""
        self._last_time = self._started = time.monotonic()
        self._blocked_seconds: float | None = None
        """How long the last save kept the training thread from training."""
        self._is_leaving_saved = False

    def after_commit(
        self,
        state: TrainingState,
        metrics: Mapping[str, float],
        *,
        rank: int,
        failures: int,
        is_leaving: bool,
    ) -> None:
        """Rank 0 saves if the schedule wants it, or if a member is leaving and was not leaving a step ago."""
        if self._pending is not None and self._pending.is_done:
            self._settle()
        is_due = self._is_due(state.committed_step, failures)
        self._awaits_evaluation = False
        if rank == 0 and is_leaving and not self._is_leaving_saved:
            self._save(state, metrics, CheckpointType.EMERGENCY)
        elif is_due and self._evaluation is not None and self._evaluation.is_due(state):
            self._awaits_evaluation = True
        elif is_due:
            self._save_or_count(state, metrics, rank)
        self._is_leaving_saved = is_leaving

    def after_evaluation(
        self, state: TrainingState, metrics: Mapping[str, float], *, rank: int
    ) -> None:
        """Save on rank 0 if the checkpoint of this step has waited for its evaluation."""
        if self._awaits_evaluation:
            self._awaits_evaluation = False
            self._save_or_count(state, metrics, rank)

    def after_last_step(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Called on rank 0: save the state unless it is saved. `CheckpointError` if it cannot be saved."""
        self._settle()
        if self._saved_step != state.committed_step:
            self.save_now(state, metrics)

    def save_now(
        self,
        state: TrainingState,
        metrics: Mapping[str, float],
        kind: CheckpointType | None = None,
    ) -> None:
        """Save and wait until the checkpoint is complete. `CheckpointError` if it cannot be saved."""
        self._settle()
        step = state.committed_step
        try:
            self._begin(state, metrics, kind)
            self._finish()
        except (TensorForgeError, OSError) as error:
            raise CheckpointError(
                f"the state after step {step} is not saved: {error}",
                self.location.store,
                CheckpointErrorType.SAVE_FAILED,
            ) from error

    def _is_due(self, step: int, failures: int) -> bool:
        now = time.monotonic()
        progress = TrainingProgress(
            step=step,
            now=now,
            last_step=self._last_step,
            last_time=self._last_time,
            save_seconds=self._blocked_seconds,
            failures=failures,
            observed_seconds=now - self._started,
        )
        return bool(self.plan.schedule.should_checkpoint(progress))

    def _save_or_count(self, state: TrainingState, metrics: Mapping[str, float], rank: int) -> None:
        if rank == 0:
            self._save(state, metrics, None)
        else:
            self._count_from(state.committed_step)

    def _count_from(self, step: int) -> None:
        """Let the schedule count from `step`, after which a worker saved or began to save."""
        self._last_step, self._last_time = step, time.monotonic()

    def _save(
        self, state: TrainingState, metrics: Mapping[str, float], kind: CheckpointType | None
    ) -> None:
        """Copy the state and save the copy in the background. A failure is logged, not raised."""
        self._settle()
        try:
            self._begin(state, metrics, kind)
        except (TensorForgeError, OSError) as error:
            log.warning("no checkpoint after step %d: %s", state.committed_step, error)

    def _begin(
        self, state: TrainingState, metrics: Mapping[str, float], kind: CheckpointType | None
    ) -> None:
        """Copy the state and begin to save the copy; nothing may be pending."""
        started = time.monotonic()
        step = state.committed_step
        self._pending = self._open().runs.async_save(
            state.model,
            state.optimizer,
            epoch=state.epoch,
            step=step,
            metrics={**metrics, **self._evaluated(step)},
            checkpoint_type=kind,
            options=SaveOptions(include_rng_state=False, extra_state=_bookkeeping(state)),
        )
        self._blocked_seconds = time.monotonic() - started
        self._count_from(step)
        record = self._pending.record
        self._run_log.write(
            "checkpoint",
            type=record.checkpoint_type.value,
            step=step,
            checkpoint=record.checkpoint_id,
            complete=False,
        )

    def _evaluated(self, step: int) -> dict[str, float]:
        results = {} if self._evaluation is None else self._evaluation.results.get(step, {})
        return {f"{EVALUATION}{name}": value for name, value in results.items()}

    def _settle(self) -> None:
        """Wait for the save in the background, if there is one. A failure is logged, not raised."""
        pending = self._pending
        try:
            self._finish()
        except (TensorForgeError, OSError) as error:
            step = pending.record.step if pending is not None else -1
            log.warning("the checkpoint after step %d failed: %s", step, error)

    def _finish(self) -> None:
        """Wait for the save in the background, if there is one, and raise its error."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        record = pending.result()
        self._saved_step = record.step
        self._run_log.write(
            "checkpoint", step=record.step, checkpoint=record.checkpoint_id, complete=True
        )

    def restore(self, state: TrainingState) -> None:
        """Load the newest intact checkpoint into `state`, if the run has any checkpoint.

        `CheckpointError` if it has some, but none can be restored.
        """
        restored = self._load(state)
        if restored is None:
            return
        prefix = restored.record.storage_path
        digest = _restore_bookkeeping(state, restored)
        if state.capture().digest().hex() != digest:
            raise IntegrityError(
                f"the state loaded from {prefix} differs from the one that was saved"
            )
        self._saved_step = state.committed_step
        self._count_from(state.committed_step)
        for damaged in restored.damaged:
            log.warning("checkpoint %s is damaged; an older one was loaded", damaged)
        log.info("resumed after step %d from %s", state.committed_step, prefix)
        self._run_log.write("resumed", committed_step=state.committed_step)

    def _load(self, state: TrainingState) -> Restored | None:
        opened = self._open()
        try:
            return opened.runs.restore(
                state.model, state.optimizer, options=LoadOptions(load_rng_state=False)
            )
        except NotFoundError as error:
            run = self.plan.run_id
            records = opened.manager.list_for_run(run)
            if any(record.state is not CheckpointState.CREATING for record in records):
                raise CheckpointError(
                    f"{error}; to begin anew, choose another run_id, or resume=False",
                    self.location.store,
                    CheckpointErrorType.LOAD_FAILED,
                ) from error
            others = [other.training_run_id for other in opened.manager.list_runs()]
            if others:
                log.warning(
                    "run %r begins at step 0; the catalog has other runs: %s",
                    run,
                    ", ".join(map(repr, others)),
                )
            return None

    def close(self) -> None:
        """Wait for the last save, then close the store and the catalog."""
        self._settle()
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.close()

    def _open(self) -> _Opened:
        """The run's checkpoints. The first call cleans up after crashes and completes the catalog."""
        if self._opened is None:
            with ExitStack() as undo:
                store = open_store(self.plan.location)
                checkpoint = DistributedCheckpoint(SingleProcess(), store)
                undo.callback(checkpoint.close)
                manager = self.location.open_catalog(store, self.plan.retention)
                undo.callback(manager.close)
                runs = RunCheckpoints(
                    manager,
                    checkpoint,
                    self.plan.run_id,
                    increments=self.plan.increments,
                    collects_garbage=True,
                )
                runs.sweep()
                rebuild(manager, store, old_run=self.plan.run_id)
                undo.pop_all()
            self._opened = _Opened(checkpoint, manager, runs)
            self._note_location()
        return self._opened

    def _note_location(self) -> None:
        folder = RUN_DIR.read()
        if folder is None:
            return
        try:
            self.location.write(folder)
        except OSError as error:
            log.warning("the commands will not find the checkpoints by --run-dir: %s", error)


def _bookkeeping(state: TrainingState) -> dict[str, Any]:
    """What the model's and the optimizer's state do not have, and the digest of everything."""
    saved = set(state.model.state_dict())
    transient = {n: b for n, b in state.model.named_buffers() if n not in saved}
    digest = state.capture().digest().hex()
    return {"transient": transient, **state.bookkeeping(), "digest": digest}


def _restore_bookkeeping(state: TrainingState, restored: Restored) -> str:
    """Restore what `_bookkeeping` returned at the save, and return the digest of the saved state."""
    content = dict(restored.result.extra_state)
    old = restored.result.custom_metadata.get(OLD_BOOKKEEPING)
    if old is not None:
        content = _old_bookkeeping(old)
    if "progress" not in content:
        prefix = restored.record.storage_path
        raise CheckpointError(
            f"{prefix} holds a model, but not the position of a run in its data", prefix
        )
    buffers = dict(state.model.named_buffers())
    with torch.no_grad():
        for name, tensor in content["transient"].items():
            buffers[name].copy_(tensor)
    state.restore_bookkeeping(content)
    return str(content["digest"])


def _old_bookkeeping(packed: Mapping[str, Any]) -> dict[str, Any]:
    """The bookkeeping that the first versions stored as base64 in the custom metadata."""
    flat = empty_like_header(packed["header"].encode())
    for tensor, text in zip(flat.tensors, packed["tensors"], strict=True):
        raw = bytearray(base64.b64decode(text))
        if raw:
            tensor.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(raw, dtype=torch.uint8))
    return {**unflatten(flat), "digest": packed["digest"]}
