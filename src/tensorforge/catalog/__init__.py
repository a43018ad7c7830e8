"""What checkpoints there are, what is kept, what to restore. Starts without torch.

records, chains, retention, restore, schedule    pure: values in, decisions with reasons out
manager, queries, schema, measurements           the same over a database
"""

from tensorforge.catalog.chains import (
    chain_length,
    chain_size,
    find_chain_root,
    restoration_chain,
    validate_checkpoint,
)
from tensorforge.catalog.manager import CheckpointManager, RestorePlan, RunSummary
from tensorforge.catalog.records import (
    CHECKPOINT_LIFECYCLE,
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    CreateCheckpointRequest,
    GcPolicy,
    RestoreCriteria,
)
from tensorforge.catalog.restore import (
    RestoreRates,
    estimate_restore_time,
    score_checkpoint,
    selection_score,
)
from tensorforge.catalog.retention import RetentionDecision, decide_retention, is_gc_eligible
from tensorforge.catalog.schedule import (
    CheckpointSchedule,
    ScheduleDecision,
    TrainingProgress,
    estimate_mtbf,
    young_daly_interval,
)

__all__ = [
    "CHECKPOINT_LIFECYCLE",
    "CheckpointManager",
    "CheckpointRecord",
    "CheckpointSchedule",
    "CheckpointState",
    "CheckpointType",
    "CreateCheckpointRequest",
    "GcPolicy",
    "RestoreCriteria",
    "RestorePlan",
    "RestoreRates",
    "RetentionDecision",
    "RunSummary",
    "ScheduleDecision",
    "TrainingProgress",
    "chain_length",
    "chain_size",
    "decide_retention",
    "estimate_mtbf",
    "estimate_restore_time",
    "find_chain_root",
    "is_gc_eligible",
    "restoration_chain",
    "score_checkpoint",
    "selection_score",
    "validate_checkpoint",
    "young_daly_interval",
]
