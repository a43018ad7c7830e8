"""Transitions along the lifecycle, and rollbacks.

A transition compares the expected revision, checks the lifecycle and the evidence, sets the state, and writes
the audit row, all in one transaction. Several versions of a model may be in production: the one that entered it
last serves, the others stand by. A rollback deprecates the version that serves and lets the best version that
stands by serve, so that the lifecycle needs no transition back into production.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tensorforge.errors import (
    ConflictError,
    InvalidInputError,
    LostRaceError,
    NotFoundError,
    PermissionDeniedError,
)
from tensorforge.registry.database.rows import (
    VERSION_QUERY,
    latest_validation,
    to_metadata,
    to_sla,
    version_of,
)
from tensorforge.registry.database.tables import PRODUCTION, VERSIONS
from tensorforge.registry.database.writes.changes import Change
from tensorforge.registry.domain.deployment_lifecycle import (
    DEPLOYMENT_LIFECYCLE,
    DeploymentState,
    needs_evidence,
)
from tensorforge.registry.domain.evidence import describe_evidence, evidence_problem
from tensorforge.registry.domain.models import Actor, Rollback, Transition, ValidationResult
from tensorforge.registry.domain.names import check_text
from tensorforge.registry.domain.selection import assess_rollback, select_best_model
from tensorforge.registry.domain.signatures import signature_problem
from tensorforge.registry.domain.versions import ModelVersion
from tensorforge.storage.prepared import Row

FORCE = "registry:force"
"""The scope that an actor needs to force a transition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionRequest:
    """The conditions of a transition.

    `force` overrides missing evidence. With `expected_revision` the transition happens only if the version is
    at that revision. `retire_previous` deprecates every other version in production.
    """

    reason: str = ""
    force: bool = False
    expected_revision: int | None = None
    retire_previous: bool = False

    def check(self, actor: Actor) -> None:
        """Refuse a forced transition that has no reason, or whose actor lacks the scope `registry:force`."""
        check_text("reason", self.reason)
        if not self.force:
            return
        if not self.reason.strip():
            raise InvalidInputError("a forced transition needs a reason, which the audit keeps")
        if FORCE not in actor.scopes:
            raise PermissionDeniedError(f"{actor.name} may not force a transition: needs {FORCE}")


def make_transitions(
    change: Change,
    version: ModelVersion,
    path: Iterable[DeploymentState],
    request: TransitionRequest,
) -> Transition:
    """Take a version through the states of `path`, one audit row each.

    Raises `LostRaceError` if the version is not at the expected revision, `TransitionError` if the lifecycle
    does not have a transition, `ConflictError` if evidence is missing. The caller's transaction then undoes all
    of them.
    """
    row, sequence = change.find_version(version), 0
    previous = DeploymentState(row["state"])
    request.check(change.actor)
    for state in path:
        sequence = make_transition(change, row, state, request)
        request = replace(request, expected_revision=None)
        change, row = change.reload(), change.find_version(version)
    if request.retire_previous and row["state"] == DeploymentState.PRODUCTION.value:
        _retire_others(change, row)
    return Transition(metadata=to_metadata(row), previous=previous, audit_sequence=sequence)


def make_transition(
    change: Change, row: Row, target: DeploymentState, request: TransitionRequest
) -> int:
    """Take the version in `row` into `target`; returns the number of the audit row."""
    current = DeploymentState(row["state"])
    _check_revision(row, request)
    DEPLOYMENT_LIFECYCLE.require(current, target)
    evidence = _require_evidence(change, row, target, request)
    _set_state(change, row, target)
    entry = change.record(
        "transition",
        version=version_of(row),
        from_state=current.value,
        to_state=target.value,
        reason=request.reason,
        evidence=evidence,
        forced="overridden" in evidence,
    )
    _update_serving(change, row, target, entry)
    return int(entry["sequence"])


def move_outside_lifecycle(change: Change, row: Row, target: DeploymentState, reason: str) -> None:
    """Set a version's state along an edge that only MLflow has; the audit shows it as a `stage_move`."""
    _set_state(change, row, target)
    entry = change.record(
        "stage_move",
        version=version_of(row),
        from_state=row["state"],
        to_state=target.value,
        reason=reason,
    )
    _update_serving(change, row, target, entry)


def _update_serving(change: Change, row: Row, target: DeploymentState, entry: Row) -> None:
    """Let the version serve that serves after the version in `row` entered `target`."""
    if target is DeploymentState.PRODUCTION:
        _set_serving(change, row, entry)
    elif change.model["production_key"] == row["key"]:
        _set_serving(change, _best(change, _standing_by(change, row)), entry)
    else:
        change.update_model()


def _check_revision(row: Row, request: TransitionRequest) -> None:
    expected = request.expected_revision
    if expected is not None and expected != row["revision"]:
        allowed = DEPLOYMENT_LIFECYCLE.allowed(DeploymentState(row["state"]))
        raise LostRaceError(
            f"{row['model_id']} {version_of(row)} has changed: expected revision {expected}, found "
            f"{row['revision']} in state {row['state']} (from there to: "
            f"{', '.join(state.value for state in allowed) or 'nothing'})"
        )


def _require_evidence(
    change: Change, row: Row, target: DeploymentState, request: TransitionRequest
) -> dict[str, Any]:
    """What the audit says about the evidence for a transition; `ConflictError` if it is missing."""
    current = DeploymentState(row["state"])
    if not needs_evidence(current, target):
        return {}
    record = latest_validation(change.connection, row["model_id"], row)
    sla = to_sla(change.model)
    problem = evidence_problem(record, current, row["revision"], sla)
    if problem is None and sla is not None and sla.signed_by:
        problem = signature_problem(to_metadata(row), sla.signed_by)
    if problem is None:
        return describe_evidence(record, sla)
    if not request.force:
        raise ConflictError(
            f"{row['model_id']} {version_of(row)} cannot go from {current.value} to {target.value}: "
            f"{problem}. Record a passing validation, or force the transition with a reason"
        )
    return {**describe_evidence(record, sla), "overridden": problem}


def _set_state(change: Change, row: Row, target: DeploymentState) -> None:
    updated = change.connection.execute(
        VERSIONS.update()
        .where(VERSIONS.c.key == row["key"], VERSIONS.c.revision == row["revision"])
        .values(state=target.value, revision=VERSIONS.c.revision + 1, updated_us=change.now_us)
    )
    if updated.rowcount != 1:
        raise LostRaceError(
            f"{row['model_id']} {version_of(row)} has left {row['state']}; read it and try again"
        )


def _set_serving(change: Change, row: Row | None, entry: Row) -> None:
    """Let a version of the model serve from the time of the audit row `entry` on, or none."""
    at_us: int = entry["at_us"]
    replace(change, now_us=at_us).update_model(production_key=None if row is None else row["key"])
    change.connection.execute(
        PRODUCTION.insert().values(
            sequence=entry["sequence"],
            model_key=change.model["key"],
            at_us=at_us,
            version=None if row is None else str(version_of(row)),
        )
    )


def _standing_by(change: Change, serving: Row) -> Sequence[Row]:
    """The model's versions in production, except `serving`."""
    query = VERSION_QUERY.where(
        VERSIONS.c.model_key == change.model["key"],
        VERSIONS.c.state == DeploymentState.PRODUCTION.value,
        VERSIONS.c.key != serving["key"],
    )
    return change.connection.execute(query).mappings().all()


def _best(change: Change, rows: Sequence[Row]) -> Row | None:
    """The version with the best validation; the highest version if none was validated."""
    results = {version_of(row): _latest_result(change, row) for row in rows}
    measured = ((to_metadata(row), results[version_of(row)]) for row in rows)
    best = select_best_model((each, result) for each, result in measured if result is not None)
    if best is not None:
        return next(row for row in rows if version_of(row) == best.version)
    return max(rows, key=version_of, default=None)


def _latest_result(change: Change, row: Row) -> ValidationResult | None:
    record = latest_validation(change.connection, row["model_id"], row)
    return None if record is None else record.result


def _retire_others(change: Change, serving: Row) -> None:
    """Deprecate every version in production except the one that serves."""
    request = TransitionRequest(reason=f"replaced by {version_of(serving)}")
    for other in _standing_by(change, serving):
        make_transition(change, other, DeploymentState.DEPRECATED, request)


def roll_back(change: Change, target: ModelVersion | None, request: TransitionRequest) -> Rollback:
    """Deprecate the version that serves; `target`, or the best version that stands by, serves instead."""
    request.check(change.actor)
    if change.model["production_key"] is None:
        raise ConflictError(
            f"no version of {change.model_id!r} is in production, so none can be rolled back"
        )
    query = VERSION_QUERY.where(VERSIONS.c.key == change.model["production_key"])
    serving = change.connection.execute(query).mappings().one()
    _check_revision(serving, request)
    chosen = _choose(change, serving, target)
    reasons = _reasons(change, serving, chosen, target)
    _set_state(change, serving, DeploymentState.DEPRECATED)
    entry = change.record(
        "rollback",
        version=version_of(serving),
        from_state=DeploymentState.PRODUCTION.value,
        to_state=DeploymentState.DEPRECATED.value,
        reason=request.reason,
        evidence={"serves_now": str(version_of(chosen)), "reasons": list(reasons)},
    )
    _set_serving(change, chosen, entry)
    return Rollback(
        model_id=change.model_id,
        previous=version_of(serving),
        current=version_of(chosen),
        reasons=reasons,
        audit_sequence=int(entry["sequence"]),
    )


def _choose(change: Change, serving: Row, target: ModelVersion | None) -> Row:
    standing_by = _standing_by(change, serving)
    if target is not None:
        for row in standing_by:
            if version_of(row) == target:
                return row
        names = ", ".join(str(version_of(row)) for row in standing_by) or "none"
        raise NotFoundError(
            f"{change.model_id} {target} does not stand by in production; these do: {names}"
        )
    best = _best(change, standing_by)
    if best is None:
        raise ConflictError(
            f"{change.model_id} {version_of(serving)} is the only version in production: "
            "there is nothing to go back to"
        )
    return best


def _reasons(
    change: Change, serving: Row, chosen: Row, target: ModelVersion | None
) -> tuple[str, ...]:
    current, baseline = _latest_result(change, serving), _latest_result(change, chosen)
    how = "named by the caller" if target is not None else "the best that stands by"
    reasons = [f"{version_of(chosen)} is {how}"]
    if current is not None and baseline is not None:
        reasons += assess_rollback(current, baseline).reasons
    return tuple(reasons)
