"""What is said about a model or a version: its name, its description, its SLA. Each change is audited."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tensorforge.registry.database.audit import AuditFact
from tensorforge.registry.database.rows import to_sla, version_of
from tensorforge.registry.database.tables import MODELS, VERSIONS
from tensorforge.registry.database.writes import changes
from tensorforge.registry.domain.models import Actor, Sla
from tensorforge.storage.prepared import Row


def touch_model(connection: sa.Connection, model: Row, now_us: int, **values: Any) -> None:
    """Change columns of a locked model, and note that it was changed."""
    connection.execute(
        MODELS.update().where(MODELS.c.key == model["key"]).values(updated_us=now_us, **values)
    )


def describe_model(
    connection: sa.Connection, model: Row, description: str, actor: Actor, now_us: int
) -> None:
    """Replace the description of a locked model."""
    if description == model["description"]:
        return
    touch_model(connection, model, now_us, description=description)
    change = {"old": model["description"], "new": description}
    changes.record(connection, _fact(model, "describe", actor, change), now_us)


def describe_version(
    connection: sa.Connection,
    model: Row,
    version: Row,
    description: str,
    actor: Actor,
    now_us: int,
) -> None:
    """Replace the description of a version of a locked model."""
    if description == version["description"]:
        return
    connection.execute(
        VERSIONS.update()
        .where(VERSIONS.c.key == version["key"])
        .values(description=description, updated_us=now_us)
    )
    change = {"old": version["description"], "new": description}
    fact = _fact(model, "describe", actor, change, version=str(version_of(version)))
    changes.record(connection, fact, now_us)


def rename_model(
    connection: sa.Connection, model: Row, new_id: str, actor: Actor, now_us: int
) -> None:
    """Give a locked model another name."""
    touch_model(connection, model, now_us, model_id=new_id)
    renamed = {**model, "model_id": new_id}
    fact = _fact(renamed, "rename_model", actor, {"previous": model["model_id"]})
    changes.record(connection, fact, now_us)


def set_sla(
    connection: sa.Connection, model: Row, sla: Sla | None, actor: Actor, now_us: int
) -> None:
    """Say what every version of a locked model must reach; `None` for no limits."""
    latency, accuracy = (sla.max_latency_ms, sla.min_accuracy) if sla else (None, None)
    limits = {"sla_max_latency_ms": latency, "sla_min_accuracy": accuracy}
    touch_model(connection, model, now_us, **limits)
    before = to_sla(model)
    change = {
        "max_latency_ms": latency,
        "min_accuracy": accuracy,
        "previous": before and [before.max_latency_ms, before.min_accuracy],
    }
    changes.record(connection, _fact(model, "set_sla", actor, change), now_us)


def _fact(
    model: Row, action: str, actor: Actor, evidence: dict[str, Any], *, version: str = ""
) -> AuditFact:
    return AuditFact(
        actor=actor.name,
        action=action,
        model_key=model["key"],
        model_id=model["model_id"],
        version=version,
        evidence=evidence,
    )
