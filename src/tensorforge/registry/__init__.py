"""The model registry: semantic versions, a lifecycle with evidence, and an audit that shows tampering.

`domain` decides, without database or clock. `database` stores: every write is a `Change`, one transaction that
locks one model and ends with one audit row and its webhook messages. `ModelRegistry` is what programs call,
`service` what HTTP clients call. Beside them: `weights`, `export` and `model_validation` work on model files,
`tokens` has the service's tokens, `webhooks` and `addresses` deliver messages.

A transition over HTTP, `POST /api/v1/models/M/versions/1.0.0/transitions`, goes through:

1. `service/application.AccessMiddleware`: size, token and rate; Starlette's router finds the endpoint.
2. `service/endpoints._perform`: the scope, the query and the body, decoded into a `Call`.
3. `service/context.ServiceContext.run`; with SQLite `service/write_queue.WriteQueue.run`, the writing thread.
4. `service/rest/versions_api.transition_version`: the body, and the revision in `If-Match`.
5. `model_registry.ModelRegistry.transition_state`, `transition_path`: a transaction and its `Change`.
6. `database/writes/transitions.make_transitions`: revision, lifecycle (`domain/deployment_lifecycle`), evidence
   (`domain/evidence`), the new state.
7. `database/writes/changes.Change.record`: `database/audit.append` and `database/outbox.enqueue`.
8. `database/writes/transitions._set_serving`: which version serves, if that changes.
9. `service/endpoints._run`: the answer as JSON with the new `ETag`; it is sent after the commit.
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
