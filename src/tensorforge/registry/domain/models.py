"""The values that the registry stores and returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from tensorforge.errors import InvalidInputError
from tensorforge.registry.domain.deployment_lifecycle import DeploymentState
from tensorforge.registry.domain.versions import ModelVersion

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The type and shape of one tensor of a model."""

    dtype: str
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The run, the step and the checkpoint that a version came from.

    `logged_model_id` is the id of the logged model in MLflow, and `experiment_id` that of the run's experiment.
    """

    run_id: str = ""
    step: int | None = None
    checkpoint_id: str = ""
    run_link: str = ""
    logged_model_id: str = ""
    experiment_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetadata:
    """One version of a model.

    `model_id` identifies the model in every call; `name` is shown to people. `source` is the location of the
    weights; the registry never opens it. `download_uri` is where the files can be loaded from, if that is not
    `source` itself. `signature` is a signature of the version by the key `signed_by`. The registry sets
    `number`, which counts a model's versions from 1 in the order of registration, and `revision`, which counts
    the transitions of the version.
    """

    model_id: str
    name: str
    version: ModelVersion
    framework: str
    input_shape: Shape
    output_shape: Shape
    size_bytes: int
    checksum: str
    registered_at: datetime
    state: DeploymentState = DeploymentState.REGISTERED
    tags: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    description: str = ""
    lineage: Lineage = field(default_factory=Lineage)
    registered_by: str = ""
    updated_at: datetime | None = None
    number: int = 0
    revision: int = 0
    aliases: tuple[str, ...] = ()
    download_uri: str = ""
    signature: str = ""
    signed_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """What a validation measured. `samples` is the number of samples that `accuracy_score` was measured on.

    A figure that could not be measured is NaN, and NaN meets no limit.
    """

    model_id: str
    version: ModelVersion
    passed: bool
    latency_p50_ms: float
    latency_p99_ms: float
    accuracy_score: float
    errors: tuple[str, ...] = ()
    samples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRecord:
    """A stored validation, with the state and revision of the version at that time."""

    record_id: int
    result: ValidationResult
    state: DeploymentState
    revision: int
    recorded_at: datetime
    recorded_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sla:
    """The limits that a version must meet: the highest p99 latency and the lowest accuracy.

    If `signed_by` names public keys, the version must also be signed by one of them.
    """

    max_latency_ms: float
    min_accuracy: float
    signed_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_latency_ms) and self.max_latency_ms > 0):
            raise InvalidInputError(
                f"max_latency_ms = {self.max_latency_ms!r}: must be a positive number"
            )
        if not math.isfinite(self.min_accuracy):
            raise InvalidInputError(f"min_accuracy = {self.min_accuracy!r}: must be a number")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredModel:
    """A model: what its versions have in common. `production` is the version that serves."""

    model_id: str
    description: str
    created_at: datetime
    updated_at: datetime
    tags: Mapping[str, str]
    aliases: Mapping[str, ModelVersion]
    sla: Sla | None
    production: ModelVersion | None
    version_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who makes a change. `scopes` are special permissions, such as `registry:force`."""

    name: str
    scopes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """The result of a transition: the version after it, its previous state, and the number of the audit row."""

    metadata: ModelMetadata
    previous: DeploymentState
    audit_sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """The result of a rollback: the version that served before, the one that serves now, and why that one."""

    model_id: str
    previous: ModelVersion
    current: ModelVersion
    reasons: tuple[str, ...]
    audit_sequence: int
