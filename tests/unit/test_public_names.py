"""The public names are the few in `__all__`, and each is documented."""

import importlib
import json
import subprocess
import sys

import pytest

PUBLIC = {
    "tensorforge.catalog": {
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
    },
    "tensorforge.data": {
        "DataRedistributionPlan",
        "DataRedistributor",
        "DataShard",
        "DataTransfer",
        "IntervalSet",
        "Ledger",
        "LedgerProof",
        "Order",
        "PlanProblem",
        "PlanProblemKind",
        "PlanValidation",
        "ShardLocalOrder",
        "ShuffledOrder",
        "partition",
    },
    "tensorforge.elastic": {
        "WORKER_LIFECYCLE",
        "AdaptationStrategy",
        "ClusterTopology",
        "CoordinatorClient",
        "ElasticCoordinator",
        "ElasticTrainingConfig",
        "ElasticWorker",
        "Formation",
        "GlobalTrainingState",
        "MemberReport",
        "RedistributionType",
        "RescaleType",
        "RescalingEvent",
        "StateHooks",
        "TlsOptions",
        "TopologyHolder",
        "WorkerId",
        "WorkerMetadata",
        "WorkerStatus",
        "adapt_learning_rate",
    },
    "tensorforge.registry": {
        "Actor",
        "AuditEntry",
        "AuditHead",
        "Bump",
        "CanaryDecision",
        "CanaryPolicy",
        "CanaryVerdict",
        "DEPLOYMENT_LIFECYCLE",
        "DeploymentState",
        "DueBump",
        "Lineage",
        "ModelMetadata",
        "ModelRegistry",
        "ModelVersion",
        "RegisteredModel",
        "Rollback",
        "RollbackAssessment",
        "Sla",
        "TensorSpec",
        "Transition",
        "ValidationRecord",
        "ValidationResult",
        "VersionRange",
        "assess_rollback",
        "can_transition_state",
        "compare_versions",
        "decide_canary",
        "due_bump",
        "format_version",
        "meets_sla",
        "parse_range",
        "parse_version",
        "rollback_priority",
        "select_best_model",
        "shape_compatibility",
    },
    "tensorforge.memory": {
        "BLOCK_LIFECYCLE",
        "AllocationRequest",
        "AllocationResult",
        "BlockStatus",
        "GpuDevice",
        "MemoryBlock",
        "MemoryPool",
        "PoolStats",
        "align_up",
        "best_fit_block",
        "estimate_oom_seconds",
        "eviction_candidates",
        "fragmentation_ratio",
        "is_power_of_two",
        "memory_pressure",
        "optimal_pool_size",
        "should_defragment",
    },
    "tensorforge.train": {"Evaluation", "Run", "RunConfig", "Step"},
}

CONTROL_PLANE = [
    "tensorforge",
    "tensorforge.catalog",
    "tensorforge.data",
    "tensorforge.elastic",
    "tensorforge.elastic.coordinator",
    "tensorforge.elastic.worker",
    "tensorforge.registry",
    "tensorforge.memory",
    "tensorforge.storage.database",
    "tensorforge.storage.opening",
    "tensorforge.cli.main",
]


@pytest.mark.parametrize("package", PUBLIC)
def test_a_package_exports_exactly_what_it_promises(package):
    module = importlib.import_module(package)
    assert set(module.__all__) == PUBLIC[package]
    for name in module.__all__:
        value = getattr(module, name)
        assert not callable(value) or value.__doc__, f"{package}.{name} has no docstring"


def test_the_control_plane_starts_without_torch():
    code = (
        "import sys, json\n"
        f"for name in {CONTROL_PLANE!r}: __import__(name)\n"
        "heavy = [m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy')]\n"
        "print(json.dumps(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert json.loads(done.stdout) == []
