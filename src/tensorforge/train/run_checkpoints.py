"""Checkpoints of a run: saved by schedule, in the background, with a record in the catalog; and restoring.

The state is the same on all members, so rank 0 saves it alone and no member waits for another. If rank 0 dies
while it saves, there is no checkpoint of that step; the next rank 0 goes on with the schedule.
"""

from __future__ import annotations

import base64
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tensorforge.catalog import (
    CheckpointManager,
    CheckpointRecord,
    CheckpointSchedule,
    CheckpointType,
    CreateCheckpointRequest,
    GcPolicy,
    TrainingProgress,
)
from tensorforge.checkpoint.api import DistributedCheckpoint, SaveHandle
from tensorforge.checkpoint.format.manifest import SUFFIX
from tensorforge.checkpoint.options import LoadOptions, SaveOptions
from tensorforge.checkpoint.ranks.coordinators import SingleProcess
from tensorforge.checkpoint.store_index import delete_checkpoint
from tensorforge.errors import CheckpointError, IntegrityError, TensorForgeError
from tensorforge.storage.opening import open_store
from tensorforge.train.loop.flat_state import empty_like_header, flatten, tensor_bytes, unflatten
from tensorforge.train.loop.training_state import TrainingState
from tensorforge.train.run_log import RunLog

log = logging.getLogger(__name__)

_KEY = "tensorforge_run"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """Where and when a run is saved.

    `location`: a folder or the URL of an object store, for this run alone. `schedule`: when to save.
    `retention`: which checkpoints are kept. `run_id`: the run's name in the catalog. `catalog`: the URL or
    path of the catalog's database; by default a file in the folder, and none for an object store. `resume`:
    whether a run that starts begins with the newest intact checkpoint.
    """

    location: str | Path
    schedule: CheckpointSchedule = field(
        default_factory=lambda: CheckpointSchedule(every_seconds=600.0)
    )
    retention: GcPolicy = field(default_factory=GcPolicy)
    run_id: str = "default"
    catalog: str | Path | None = None
    resume: bool = True


class Checkpointer:
    """Saves and restores a run by its plan. Each worker has one; only rank 0's saves."""

    def __init__(self, plan: CheckpointPlan, run_log: RunLog) -> None:
        self.plan = plan
        self._run_log = run_log
        self._checkpoint: DistributedCheckpoint | None = None
        self._manager: CheckpointManager | None = None
        self._pending: tuple[SaveHandle, CheckpointRecord | None, int] | None = None
        self._last_step = -1
        """The step after which a worker saved last, as far as this worker knows."""
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
        generation: int,
        failures: int,
        is_leaving: bool,
    ) -> None:
        """Rank 0 saves if the schedule wants it, or if a member is leaving and was not leaving a step ago."""
        if self._pending is not None and self._pending[0].is_done:
            self._finish_save()
        is_due = self._is_due(state.committed_step, failures)
        if rank != 0:
            if is_due:
                self._count_from(state.committed_step)
        elif is_leaving and not self._is_leaving_saved:
            self._save(state, metrics, generation, CheckpointType.EMERGENCY)
        elif is_due:
            self._save(state, metrics, generation, CheckpointType.FULL)
        self._is_leaving_saved = is_leaving

    def after_last_step(
        self, state: TrainingState, metrics: Mapping[str, float], *, generation: int
    ) -> None:
        """Called on rank 0: save the state unless it is saved, and wait until the save is complete."""
        if self._last_step != state.committed_step:
            self._save(state, metrics, generation, CheckpointType.FULL)
        self._finish_save()

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

    def _count_from(self, step: int) -> None:
        """Let the schedule count from `step`, after which a worker saved or began to save."""
        self._last_step, self._last_time = step, time.monotonic()

    def _save(
        self,
        state: TrainingState,
        metrics: Mapping[str, float],
        generation: int,
        kind: CheckpointType,
    ) -> None:
        """Copy the state and save the copy in the background. A failure is logged, not raised."""
        started = time.monotonic()
        self._finish_save()
        step = state.committed_step
        prefix = f"step-{step:08d}-g{generation}-{secrets.token_hex(3)}"
        try:
            record = self._create_record(state, kind, metrics)
            options = SaveOptions(
                checkpoint_prefix=prefix,
                include_rng_state=False,
                custom_metadata={_KEY: _pack(state)},
            )
            handle = self._open().async_save(state.model, state.optimizer, options)
        except TensorForgeError as error:
            log.warning("no checkpoint after step %d: %s", step, error)
        else:
            self._pending = (handle, record, step)
            self._blocked_seconds = time.monotonic() - started
            self._count_from(step)
        self._run_log.write("checkpoint", type=kind.value, step=step, complete=False)

    def _finish_save(self) -> None:
        """Wait for the save in the background, if there is one, and complete its record in the catalog."""
        if self._pending is None:
            return
        (handle, record, step), self._pending = self._pending, None
        try:
            prefix = handle.result()
            manager = self._catalog()
            if record is not None and manager is not None:
                size = self._size_of(prefix)
                manager.complete(record.checkpoint_id, size, f"{prefix}{SUFFIX}")
                manager.gc(training_run_id=self.plan.run_id)
        except (TensorForgeError, OSError) as error:
            log.warning("checkpoint %s failed: %s", handle.prefix, error)
            return
        self._run_log.write("checkpoint", step=step, complete=True)

    def restore(self, state: TrainingState) -> None:
        """Load the newest intact checkpoint into `state`, if there is one."""
        checkpoint = self._open()
        if not checkpoint.list_checkpoints():
            return
        result = checkpoint.load(state.model, state.optimizer, LoadOptions(load_rng_state=False))
        prefix = result.manifest.prefix
        packed = result.custom_metadata.get(_KEY)
        if packed is None:
            raise CheckpointError(
                f"{prefix} holds a model, but not the position of a run in its data", prefix
            )
        _unpack(state, packed)
        if state.capture().digest().hex() != packed["digest"]:
            raise IntegrityError(
                f"the state loaded from {prefix} differs from the one that was saved"
            )
        self._count_from(state.committed_step)
        log.info("resumed after step %d from %s", state.committed_step, prefix)
        self._run_log.write("resumed", committed_step=state.committed_step)

    def close(self) -> None:
        """Wait for the last save, then close the store and the catalog."""
        self._finish_save()
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _open(self) -> DistributedCheckpoint:
        if self._checkpoint is None:
            store = open_store(self.plan.location)
            self._checkpoint = DistributedCheckpoint(SingleProcess(), store)
        return self._checkpoint

    def _catalog(self) -> CheckpointManager | None:
        if self._manager is None:
            database = self.plan.catalog
            if database is None and "://" not in str(self.plan.location):
                database = Path(self.plan.location) / "catalog.db"
            if database is not None:
                self._manager = CheckpointManager(
                    self.plan.retention, database=database, remove_files=self._remove
                )
        return self._manager

    def _create_record(
        self, state: TrainingState, kind: CheckpointType, metrics: Mapping[str, float]
    ) -> CheckpointRecord | None:
        manager = self._catalog()
        if manager is None:
            return None
        request = CreateCheckpointRequest(
            training_run_id=self.plan.run_id,
            epoch=state.epoch,
            step=state.committed_step,
            checkpoint_type=kind,
            metrics=metrics,
        )
        return manager.create(request)

    def _size_of(self, prefix: str) -> int:
        found = [c for c in self._open().list_checkpoints() if c.prefix == prefix]
        return found[0].size_bytes if found else 0

    def _remove(self, record: CheckpointRecord) -> None:
        if record.storage_path:
            delete_checkpoint(self._open().storage, record.storage_path.removesuffix(SUFFIX))


def _pack(state: TrainingState) -> dict[str, Any]:
    """What the model's and the optimizer's files do not have, as JSON."""
    saved = set(state.model.state_dict())
    transient = {n: b for n, b in state.model.named_buffers() if n not in saved}
    flat = flatten({"transient": transient, **state.bookkeeping()})
    return {
        "header": flat.header().decode(),
        "tensors": [
            base64.b64encode(tensor_bytes(tensor).numpy().tobytes()).decode()
            for tensor in flat.tensors
        ],
        "digest": state.capture().digest().hex(),
    }


def _unpack(state: TrainingState, packed: Mapping[str, Any]) -> None:
    flat = empty_like_header(packed["header"].encode())
    for tensor, text in zip(flat.tensors, packed["tensors"], strict=True):
        raw = bytearray(base64.b64decode(text))
        if raw:
            tensor.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(raw, dtype=torch.uint8))
    content = unflatten(flat)
    buffers = dict(state.model.named_buffers())
    with torch.no_grad():
        for name, tensor in content["transient"].items():
            buffers[name].copy_(tensor)
    state.restore_bookkeeping(content)
