"""The catalog of checkpoints: which exist, which are kept, which one to restore. Imports no torch.

A save passes through `runs`: it creates a record (`manager`), writes the files with `tensorforge.checkpoint`
(`increments` finds the chunks that a parent has already), verifies them and completes the record. A full chain
is made self-contained by `compaction`. `deletion` removes records first and files later.

`chains` has the pure rules: records, chains of parents, retention, choice of a restore point, schedules.
`manager`, `queries`, `schema`, `measurements` and `identifiers` are the database; `stored_records` relates
records to files; `upkeep` repairs after crashes, verifies and rebuilds; `emergency` saves on signals.
`checkpoint_location` is the file in a run's folder that says where its checkpoints and their catalog are.
Modules that touch files are imported at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tensorforge.catalog.chains.chains import (
    chain_length,
    chain_size,
    find_chain_root,
    restoration_chain,
    validate_checkpoint,
)
from tensorforge.catalog.chains.records import (
    CHECKPOINT_LIFECYCLE,
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    CreateCheckpointRequest,
    GcPolicy,
    RestoreCriteria,
)
from tensorforge.catalog.chains.restore import (
    RestoreRates,
    estimate_restore_time,
    score_checkpoint,
    selection_score,
)
from tensorforge.catalog.chains.retention import RetentionDecision, decide_retention, is_gc_eligible
from tensorforge.catalog.chains.schedule import (
    CheckpointSchedule,
    ScheduleDecision,
    TrainingProgress,
    estimate_mtbf,
    young_daly_interval,
)
from tensorforge.catalog.emergency import EmergencySaves
from tensorforge.catalog.manager import CheckpointManager, RestorePlan, RunSummary

if TYPE_CHECKING:
    from tensorforge.catalog.compaction import compact
    from tensorforge.catalog.increments import IncrementPolicy
    from tensorforge.catalog.pending import PendingSave
    from tensorforge.catalog.runs import Restored, RunCheckpoints
    from tensorforge.catalog.stored_records import remover
    from tensorforge.catalog.upkeep import RebuildReport, SweepReport, rebuild, sweep, verify

_LAZY = {
    "IncrementPolicy": "increments",
    "PendingSave": "pending",
    "RebuildReport": "upkeep",
    "Restored": "runs",
    "RunCheckpoints": "runs",
    "SweepReport": "upkeep",
    "compact": "compaction",
    "rebuild": "upkeep",
    "remover": "stored_records",
    "sweep": "upkeep",
    "verify": "upkeep",
}

__all__ = [
    "CHECKPOINT_LIFECYCLE",
    "CheckpointManager",
    "CheckpointRecord",
    "CheckpointSchedule",
    "CheckpointState",
    "CheckpointType",
    "CreateCheckpointRequest",
    "EmergencySaves",
    "GcPolicy",
    "IncrementPolicy",
    "PendingSave",
    "RebuildReport",
    "RestoreCriteria",
    "RestorePlan",
    "RestoreRates",
    "Restored",
    "RetentionDecision",
    "RunCheckpoints",
    "RunSummary",
    "ScheduleDecision",
    "SweepReport",
    "TrainingProgress",
    "chain_length",
    "chain_size",
    "compact",
    "decide_retention",
    "estimate_mtbf",
    "estimate_restore_time",
    "find_chain_root",
    "is_gc_eligible",
    "rebuild",
    "remover",
    "restoration_chain",
    "score_checkpoint",
    "selection_score",
    "sweep",
    "validate_checkpoint",
    "verify",
    "young_daly_interval",
]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
