"""Moves of versions between MLflow's stages, each with all that it causes in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensorforge.errors import TransitionError
from tensorforge.registry.database.rows import VERSION_QUERY, to_metadata, version_of
from tensorforge.registry.database.tables import VERSIONS
from tensorforge.registry.database.writes.changes import Change
from tensorforge.registry.database.writes.transitions import (
    FORCE,
    TransitionRequest,
    make_transition,
    move_outside_lifecycle,
)
from tensorforge.registry.domain.deployment_lifecycle import (
    DEPLOYMENT_LIFECYCLE,
    DeploymentState,
    needs_evidence,
)
from tensorforge.registry.domain.mlflow_stages import ENTERED, STAGES, StageMoves, steps_into
from tensorforge.registry.domain.models import ModelMetadata
from tensorforge.registry.domain.versions import ModelVersion
from tensorforge.storage.prepared import Row

_REASON = "transition-stage by an MLflow client"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """A stage to enter. `archive_existing` moves every other version out of the stage."""

    stage: str
    archive_existing: bool = False
    moves: StageMoves = StageMoves.LENIENT


def enter_stage(change: Change, version: ModelVersion, request: StageRequest) -> ModelMetadata:
    """Take a version into a stage and return it as it is stored then.

    A version that is in the stage already stays as it is. `TransitionError` if there is no way into the stage;
    `ConflictError` if evidence is missing and the actor lacks the scope `registry:force`. The caller's
    transaction then undoes everything.
    """
    _take_steps(change, version, request.stage, request.moves)
    if request.archive_existing:
        for other in _others_in(change, version, request.stage):
            goal = "Archived"
            if request.moves is StageMoves.STRICT and request.stage == "Staging":
                goal = "None"
            _take_steps(change, version_of(other), goal, request.moves)
    return to_metadata(change.find_version(version))


def _take_steps(change: Change, version: ModelVersion, stage: str, moves: StageMoves) -> None:
    row = change.find_version(version)
    current = DeploymentState(row["state"])
    steps = steps_into(current, stage, moves)
    if steps is None:
        allowed = DEPLOYMENT_LIFECYCLE.allowed(current)
        raise TransitionError("model version", current, ENTERED[stage], allowed)
    for step in steps:
        if step.direct:
            move_outside_lifecycle(change, row, step.target, _REASON)
        else:
            gated = needs_evidence(DeploymentState(row["state"]), step.target)
            force = gated and FORCE in change.actor.scopes
            make_transition(
                change, row, step.target, TransitionRequest(reason=_REASON, force=force)
            )
        change = change.reload()
        row = change.find_version(version)


def _others_in(change: Change, version: ModelVersion, stage: str) -> Sequence[Row]:
    query = VERSION_QUERY.where(
        VERSIONS.c.model_key == change.model["key"],
        VERSIONS.c.state.in_([state.value for state in STAGES[stage]]),
    )
    rows = change.connection.execute(query).mappings().all()
    return [row for row in rows if version_of(row) != version]
