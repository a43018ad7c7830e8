"""The model registry: semantic versions, a lifecycle with evidence, and an audit that shows tampering.

versions, ranges, lifecycle, models, shapes, selection, evidence, filters  pure
schema, expressions, rows, search, audit, changes                          on the database, shared by all
registering, measurements, moves, labels, descriptions, removing           on it, a kind of change each
reading, registry                                                          what others call
"""

from tensorforge.registry.database.audit import AuditEntry, AuditHead
from tensorforge.registry.domain.deployment_lifecycle import (
    DEPLOYMENT_LIFECYCLE,
    DeploymentState,
    can_transition_state,
)
from tensorforge.registry.domain.models import (
    Actor,
    Lineage,
    ModelMetadata,
    RegisteredModel,
    Rollback,
    Sla,
    TensorSpec,
    Transition,
    ValidationRecord,
    ValidationResult,
)
from tensorforge.registry.domain.selection import (
    CanaryDecision,
    CanaryPolicy,
    CanaryVerdict,
    RollbackAssessment,
    assess_rollback,
    decide_canary,
    meets_sla,
    rollback_priority,
    select_best_model,
)
from tensorforge.registry.domain.shapes import DueBump, due_bump, shape_compatibility
from tensorforge.registry.domain.version_ranges import VersionRange, parse_range
from tensorforge.registry.domain.versions import (
    Bump,
    ModelVersion,
    compare_versions,
    format_version,
    parse_version,
)
from tensorforge.registry.model_registry import ModelRegistry

__all__ = [
    "DEPLOYMENT_LIFECYCLE",
    "Actor",
    "AuditEntry",
    "AuditHead",
    "Bump",
    "CanaryDecision",
    "CanaryPolicy",
    "CanaryVerdict",
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
]
