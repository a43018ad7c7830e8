"""Moves along the lifecycle: compare-and-set, evidence, audit row and what serves, in one transaction.

Several versions of a model may be in production at a time: the one that was promoted last serves, the
others stand by. A rollback deprecates the one that serves and lets the best of the others serve, so no move
outside the lifecycle is ever needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tensorforge.errors import (
    ConflictError,
    InvalidInputError,
    LostRaceError,
    NotFoundError,
    PermissionDeniedError,
)
from tensorforge.registry.database.audit import AuditFact
from tensorforge.registry.database.rows import (
    VERSION_QUERY,
    find_version,
    latest_validation,
    to_metadata,
    to_sla,
    version_of,
)
from tensorforge.registry.database.tables import MODELS, PRODUCTION, VERSIONS
from tensorforge.registry.database.writes import changes
from tensorforge.registry.domain.deployment_lifecycle import (
    DEPLOYMENT_LIFECYCLE,
    DeploymentState,
    needs_evidence,
)
from tensorforge.registry.domain.evidence import describe_evidence, evidence_problem
from tensorforge.registry.domain.models import Actor, ModelMetadata, Rollback, ValidationRecord
from tensorforge.registry.domain.names import check_text
from tensorforge.registry.domain.selection import assess_rollback, select_best_model
from tensorforge.registry.domain.versions import ModelVersion
from tensorforge.storage.prepared import Row

FORCE = "registry:force"
"""The scope without which no move can be forced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A move that somebody asks for."""

    actor: Actor
    reason: str = ""
    force: bool = False
    expected_revision: int | None = None

    def check(self) -> None:
        """Refuse a forced move without a reason or without the permission."""
        check_text("reason", self.reason)
        if not self.force:
            return
        if not self.reason.strip():
            raise InvalidInputError("a forced move needs a reason; it is kept in the audit")
        if FORCE not in self.actor.scopes:
            raise PermissionDeniedError(f"{self.actor.name} may not force a move: needs {FORCE}")


def move(
    connection: sa.Connection,
    model: Row,
    version: ModelVersion,
    target: DeploymentState,
    request: Request,
    now_us: int,
) -> int:
    """Move a version of a locked model; returns the number of the audit row.

    Raises `LostRaceError` if the version is not at the expected revision, `TransitionError` if there is no such
    move, `ConflictError` if the evidence is missing.
    """
    request.check()
    row = find_version(connection, model["model_id"], version)
    current = DeploymentState(row["state"])
    _check_revision(row, version, request)
    DEPLOYMENT_LIFECYCLE.require(current, target)
    evidence = _require_evidence(connection, model, row, target, request)
    _set_state(connection, row, target, now_us)
    fact = AuditFact(
        actor=request.actor.name,
        action="transition",
        model_key=model["key"],
        model_id=model["model_id"],
        version=str(version),
        from_state=current.value,
        to_state=target.value,
        reason=request.reason,
        evidence=evidence,
        forced="overridden" in evidence,
    )
    entry = changes.record(connection, fact, now_us)
    if target is DeploymentState.PRODUCTION:
        _serve(connection, model, row, entry)
    elif model["production_key"] == row["key"]:
        _serve(connection, model, _best(connection, _standing_by(connection, model, row)), entry)
    return int(entry["sequence"])


def _check_revision(row: Row, version: ModelVersion, request: Request) -> None:
    expected = request.expected_revision
    if expected is not None and expected != row["revision"]:
        allowed = DEPLOYMENT_LIFECYCLE.allowed(DeploymentState(row["state"]))
        raise LostRaceError(
            f"{row['model_id']} {version} changed meanwhile: expected revision {expected}, found "
            f"{row['revision']} ({row['state']}; from there: "
            f"{', '.join(state.value for state in allowed) or 'nothing'})"
        )


def _require_evidence(
    connection: sa.Connection, model: Row, row: Row, target: DeploymentState, request: Request
) -> dict[str, Any]:
    current = DeploymentState(row["state"])
    if not needs_evidence(current, target):
        return {}
    record, sla = latest_validation(connection, row["model_id"], row), to_sla(model)
    problem = evidence_problem(record, current, row["revision"], sla)
    if problem is None:
        return describe_evidence(record, sla)
    if not request.force:
        raise ConflictError(
            f"{row['model_id']} {version_of(row)} cannot go from {current.value} to {target.value}: "
            f"{problem}. Record a passing validation, or force the move with a reason"
        )
    return {**describe_evidence(record, sla), "overridden": problem}


def _set_state(connection: sa.Connection, row: Row, target: DeploymentState, now_us: int) -> None:
    changed = connection.execute(
        VERSIONS.update()
        .where(VERSIONS.c.key == row["key"], VERSIONS.c.revision == row["revision"])
        .values(state=target.value, revision=VERSIONS.c.revision + 1, updated_us=now_us)
    )
    if changed.rowcount != 1:
        raise LostRaceError(
            f"{row['model_id']} {version_of(row)} left {row['state']} meanwhile; look again"
        )


def _serve(
    connection: sa.Connection, model: Row, row: Row | None, entry: Mapping[str, Any]
) -> None:
    """Let a version of the model serve from now on, or none."""
    connection.execute(
        MODELS.update()
        .where(MODELS.c.key == model["key"])
        .values(production_key=None if row is None else row["key"], updated_us=entry["at_us"])
    )
    connection.execute(
        PRODUCTION.insert().values(
            sequence=entry["sequence"],
            model_key=model["key"],
            at_us=entry["at_us"],
            version=None if row is None else str(version_of(row)),
        )
    )


def _standing_by(connection: sa.Connection, model: Row, serving: Row) -> list[Row]:
    query = VERSION_QUERY.where(
        VERSIONS.c.model_key == model["key"],
        VERSIONS.c.state == DeploymentState.PRODUCTION.value,
        VERSIONS.c.key != serving["key"],
    )
    return list(connection.execute(query).mappings())


def _best(connection: sa.Connection, rows: list[Row]) -> Row | None:
    judged: list[tuple[ModelMetadata, ValidationRecord]] = []
    unjudged: list[Row] = []
    for row in rows:
        record = latest_validation(connection, row["model_id"], row)
        if record is None:
            unjudged.append(row)
        else:
            judged.append((to_metadata(row), record))
    best = select_best_model((metadata, record.result) for metadata, record in judged)
    if best is not None:
        return next(row for row in rows if version_of(row) == best.version)
    return max(unjudged, key=version_of, default=None)


def retire_others(
    connection: sa.Connection, model: Row, serving: ModelVersion, request: Request, now_us: int
) -> None:
    """Deprecate every other version that is still in production."""
    row = find_version(connection, model["model_id"], serving)
    for other in _standing_by(connection, model, row):
        plain = Request(actor=request.actor, reason=f"replaced by {serving}")
        current = {**model, "production_key": row["key"]}
        move(connection, current, version_of(other), DeploymentState.DEPRECATED, plain, now_us)


def roll_back(
    connection: sa.Connection,
    model: Row,
    target: ModelVersion | None,
    request: Request,
    now_us: int,
) -> Rollback:
    """Deprecate what serves and let `target`, or the best version standing by, serve instead."""
    request.check()
    model_id = model["model_id"]
    if model["production_key"] is None:
        raise ConflictError(
            f"no version of {model_id!r} is in production, so none can be rolled back"
        )
    query = VERSION_QUERY.where(VERSIONS.c.key == model["production_key"])
    serving = connection.execute(query).mappings().one()
    _check_revision(serving, version_of(serving), request)
    chosen = _choose(connection, model, serving, target)
    reasons = _reasons(connection, serving, chosen, target)
    _set_state(connection, serving, DeploymentState.DEPRECATED, now_us)
    fact = AuditFact(
        actor=request.actor.name,
        action="rollback",
        model_key=model["key"],
        model_id=model_id,
        version=str(version_of(serving)),
        from_state=DeploymentState.PRODUCTION.value,
        to_state=DeploymentState.DEPRECATED.value,
        reason=request.reason,
        evidence={"serves_now": str(version_of(chosen)), "reasons": list(reasons)},
    )
    entry = changes.record(connection, fact, now_us)
    _serve(connection, model, chosen, entry)
    return Rollback(
        model_id=model_id,
        previous=version_of(serving),
        current=version_of(chosen),
        reasons=reasons,
        audit_sequence=int(entry["sequence"]),
    )


def _choose(
    connection: sa.Connection, model: Row, serving: Row, target: ModelVersion | None
) -> Row:
    standing_by = _standing_by(connection, model, serving)
    if target is not None:
        for row in standing_by:
            if version_of(row) == target:
                return row
        names = ", ".join(str(version_of(row)) for row in standing_by) or "none"
        raise NotFoundError(
            f"{model['model_id']} {target} does not stand by in production; these do: {names}"
        )
    best = _best(connection, standing_by)
    if best is None:
        raise ConflictError(
            f"{model['model_id']} {version_of(serving)} is the only version in production: "
            "there is nothing to go back to"
        )
    return best


def _reasons(
    connection: sa.Connection, serving: Row, chosen: Row, target: ModelVersion | None
) -> tuple[str, ...]:
    current = latest_validation(connection, serving["model_id"], serving)
    baseline = latest_validation(connection, chosen["model_id"], chosen)
    how = "named by the caller" if target is not None else "the best that stands by"
    reasons = [f"{version_of(chosen)} is {how}"]
    if current is not None and baseline is not None:
        reasons += assess_rollback(current.result, baseline.result).reasons
    return tuple(reasons)
