"""Changes of a model's name, description and SLA, and of a version's description."""

from __future__ import annotations

from dataclasses import replace

from tensorforge.registry.database.rows import to_sla, version_of
from tensorforge.registry.database.tables import VERSIONS
from tensorforge.registry.database.writes.changes import Change
from tensorforge.registry.domain.models import Sla
from tensorforge.storage.prepared import Row


def describe_model(change: Change, description: str) -> None:
    """Replace the model's description; the same description changes nothing and is not audited."""
    before = change.model["description"]
    if description != before:
        change.update_model(description=description)
        change.record("describe", evidence={"old": before, "new": description})


def describe_version(change: Change, version: Row, description: str) -> None:
    """Replace a version's description; the same description changes nothing and is not audited."""
    before = version["description"]
    if description == before:
        return
    change.connection.execute(
        VERSIONS.update()
        .where(VERSIONS.c.key == version["key"])
        .values(description=description, updated_us=change.now_us)
    )
    evidence = {"old": before, "new": description}
    change.record("describe", version=version_of(version), evidence=evidence)


def rename_model(change: Change, new_id: str) -> None:
    """Give the model another name."""
    change.update_model(model_id=new_id)
    renamed = replace(change, model={**change.model, "model_id": new_id})
    renamed.record("rename_model", evidence={"previous": change.model_id})


def set_sla(change: Change, sla: Sla | None) -> None:
    """Set the limits that every version must meet; `None` removes them."""
    latency, accuracy = (sla.max_latency_ms, sla.min_accuracy) if sla else (None, None)
    change.update_model(sla_max_latency_ms=latency, sla_min_accuracy=accuracy)
    before = to_sla(change.model)
    evidence = {
        "max_latency_ms": latency,
        "min_accuracy": accuracy,
        "previous": before and [before.max_latency_ms, before.min_accuracy],
    }
    change.record("set_sla", evidence=evidence)
