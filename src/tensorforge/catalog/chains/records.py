"""The record of a checkpoint, its states and types, and the requests, criteria and policies of callers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from types import MappingProxyType

from tensorforge.checkpoint.format.manifest import SUFFIX
from tensorforge.errors import ConfigurationError, InvalidInputError
from tensorforge.lifecycle import Lifecycle
from tensorforge.validation import is_number, whole_number


class CheckpointState(Enum):
    """The state of a checkpoint; `CHECKPOINT_LIFECYCLE` has the legal transitions."""

    CREATING = "creating"
    """The save has begun; some files may exist."""
    COMPLETE = "complete"
    """The manifest and every file that it lists were written."""
    CORRUPTED = "corrupted"
    """The checkpoint, or one of its ancestors, is damaged."""
    DELETED = "deleted"
    """Readers do not find the checkpoint. Its record remains for a while as a tombstone."""


class CheckpointType(Enum):
    """Why a checkpoint was saved, and whether it may have a parent."""

    FULL = "full"
    """Self-contained."""
    INCREMENTAL = "incremental"
    """Contains the changes since its parent."""
    EMERGENCY = "emergency"
    """Saved because the process was about to end; may have a parent."""


CHECKPOINT_LIFECYCLE: Lifecycle[CheckpointState] = Lifecycle(
    "checkpoint",
    {
        CheckpointState.CREATING: (
            CheckpointState.COMPLETE,
            CheckpointState.CORRUPTED,
            CheckpointState.DELETED,
        ),
        CheckpointState.COMPLETE: (CheckpointState.CORRUPTED, CheckpointState.DELETED),
        CheckpointState.CORRUPTED: (CheckpointState.DELETED,),
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """One row of the catalog.

    `size_bytes` counts the bytes of this checkpoint's own files and manifest, not those of its ancestors.
    `storage_path` is the checkpoint's prefix in its store. Earlier versions recorded the key of the manifest;
    a record made from that has the prefix too.
    `verified_at` is when all of its bytes were last read and found intact. `note` explains the state: why the
    checkpoint was deleted or is corrupted, or, while it is being created, which process saves it.
    """

    checkpoint_id: str
    training_run_id: str
    epoch: int
    step: int
    checkpoint_type: CheckpointType
    state: CheckpointState
    created_at: datetime
    size_bytes: int = 0
    parent_id: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    storage_path: str = ""
    verified_at: datetime | None = None
    note: str = ""

    def __post_init__(self) -> None:
        _require_name("checkpoint_id", self.checkpoint_id)
        _require_position(self.training_run_id, self.epoch, self.step)
        if self.size_bytes < 0:
            raise InvalidInputError(f"size_bytes = {self.size_bytes}: must not be negative")
        if self.created_at.tzinfo is None:
            raise InvalidInputError(f"created_at = {self.created_at}: needs a time zone")
        object.__setattr__(self, "metrics", MappingProxyType(dict(self.metrics)))
        object.__setattr__(self, "storage_path", self.storage_path.removesuffix(SUFFIX))

    @property
    def is_self_contained(self) -> bool:
        """Whether the checkpoint has no parent and can be restored alone."""
        return self.parent_id is None

    @property
    def recency(self) -> tuple[int, datetime, str]:
        """The sort key within a run: by step, then by time of creation."""
        return (self.step, self.created_at, self.checkpoint_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateCheckpointRequest:
    """The request to create the record of a checkpoint.

    `parent_id` is the parent of an incremental checkpoint. With `None` the catalog takes the newest restorable
    checkpoint of the run that is not after `step`.
    """

    training_run_id: str
    epoch: int
    step: int
    checkpoint_type: CheckpointType = CheckpointType.FULL
    metrics: Mapping[str, float] = field(default_factory=dict)
    parent_id: str | None = None

    def __post_init__(self) -> None:
        _require_position(self.training_run_id, self.epoch, self.step)
        if self.checkpoint_type is CheckpointType.FULL and self.parent_id is not None:
            raise InvalidInputError(
                f"parent_id = {self.parent_id!r}: a full checkpoint has no parent"
            )
        for name, value in self.metrics.items():
            if not is_number(value):
                raise InvalidInputError(f"metrics[{name!r}] = {value!r}: must be a number")
        object.__setattr__(self, "metrics", MappingProxyType(dict(self.metrics)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreCriteria:
    """Which checkpoints may be restored, and which of them are preferred.

    `require_complete=False` also admits checkpoints that are still being created; corrupted and deleted ones
    never qualify. `prefer_full` prefers every self-contained checkpoint to every one with a parent.
    """

    training_run_id: str
    max_epoch: int | None = None
    max_step: int | None = None
    require_complete: bool = True
    prefer_full: bool = False

    def __post_init__(self) -> None:
        _require_name("training_run_id", self.training_run_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPolicy:
    """Which checkpoints of each run are kept.

    `max_checkpoints_per_run`: how many of the newest are kept; `None` for no limit.
    `max_age_seconds`: older ones are deleted even if they are among the newest; `None` for no limit.
    `keep_best_n`: how many with the best `metric_key` are kept, whatever their age. While no checkpoint of the
    run has this metric, none that can be restored is deleted.
    `metric_ascending`: `True` if lower is better.
    `abandoned_after_seconds`: a record that is still in state `CREATING` after this time is deleted.
    """

    max_checkpoints_per_run: int | None = 10
    max_age_seconds: float | None = None
    keep_best_n: int = 0
    metric_key: str = "loss"
    metric_ascending: bool = True
    abandoned_after_seconds: float = 86_400.0

    def __post_init__(self) -> None:
        most = self.max_checkpoints_per_run
        if most is not None:
            whole_number("max_checkpoints_per_run", most, least=1)
        if self.max_age_seconds is not None and not self.max_age_seconds >= 0:
            rule = "must not be negative, or None for no limit"
            raise ConfigurationError("max_age_seconds", self.max_age_seconds, rule)
        whole_number("keep_best_n", self.keep_best_n, least=0)
        if self.keep_best_n and not self.metric_key:
            rule = "must name the metric that keep_best_n compares"
            raise ConfigurationError("metric_key", self.metric_key, rule)
        if not self.abandoned_after_seconds > 0:
            rule = "must be positive"
            raise ConfigurationError("abandoned_after_seconds", self.abandoned_after_seconds, rule)


def metric_of(record: CheckpointRecord, key: str) -> float | None:
    """The value of a metric; `None` if it is missing or NaN."""
    value = record.metrics.get(key)
    return None if value is None or math.isnan(value) else float(value)


def _require_name(field_name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidInputError(f"{field_name} = {value!r}: must be a non-empty string")


def _require_position(run: object, epoch: int, step: int) -> None:
    _require_name("training_run_id", run)
    for name, value in (("epoch", epoch), ("step", step)):
        whole_number(name, value, least=0)
