"""Changes of a model's name, description and SLA, and of a version's description and signature."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tensorforge.registry.database.rows import to_metadata, to_sla, version_of
from tensorforge.registry.database.tables import VERSIONS
from tensorforge.registry.database.writes.changes import Change
from tensorforge.registry.domain.models import Sla
from tensorforge.registry.domain.signatures import check_public_key, check_signature
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
    keys = [check_public_key(key) for key in sla.signed_by] if sla else []
    change.update_model(
        sla_max_latency_ms=latency, sla_min_accuracy=accuracy, sla_signed_by=" ".join(keys)
    )
    before = to_sla(change.model)
    evidence: dict[str, Any] = {
        "max_latency_ms": latency,
        "min_accuracy": accuracy,
        "previous": before and [before.max_latency_ms, before.min_accuracy],
    }
    if keys or (before and before.signed_by):
        evidence["signed_by"] = keys
    change.record("set_sla", evidence=evidence)


def sign_version(change: Change, version: Row, signature: str, public_key: str) -> None:
    """Store a signature of a version, in place of an earlier one; `IntegrityError` if it does not fit."""
    check_signature(to_metadata(version), signature, public_key)
    change.connection.execute(
        VERSIONS.update()
        .where(VERSIONS.c.key == version["key"])
        .values(signature=signature, signed_by=public_key, updated_us=change.now_us)
    )
    evidence = {"signature": signature, "signed_by": public_key}
    change.record("sign", version=version_of(version), evidence=evidence)
