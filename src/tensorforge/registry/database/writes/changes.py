"""A change to one model: a locked row, and at the end an audit row with its messages to webhooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from tensorforge.registry.database import audit, outbox
from tensorforge.registry.database.rows import find_model, find_version
from tensorforge.registry.database.tables import MODELS
from tensorforge.registry.domain.models import Actor
from tensorforge.registry.domain.versions import ModelVersion
from tensorforge.storage.prepared import Row


@dataclass(frozen=True, slots=True)
class Change:
    """A write transaction on one model. The model's row stays locked until the transaction ends."""

    connection: sa.Connection
    model: Row
    actor: Actor
    now_us: int

    @property
    def model_id(self) -> str:
        """The model's name."""
        return str(self.model["model_id"])

    def find_version(self, version: ModelVersion) -> Row:
        """The row of one of the model's versions; `NotFoundError` if there is none."""
        return find_version(self.connection, self.model_id, version)

    def update_model(self, **columns: Any) -> None:
        """Set columns of the model's row, and the time of its last update."""
        self.connection.execute(
            MODELS.update()
            .where(MODELS.c.key == self.model["key"])
            .values(updated_us=self.now_us, **columns)
        )

    def reload(self) -> Change:
        """The same change with the model's row as it is now."""
        return replace(self, model=find_model(self.connection, self.model_id, lock=True))

    def record(
        self,
        action: str,
        *,
        version: ModelVersion | None = None,
        from_state: str = "",
        to_state: str = "",
        reason: str = "",
        evidence: Mapping[str, Any] | None = None,
        forced: bool = False,
    ) -> Row:
        """Append the change to the audit, queue its messages to webhooks, and return the audit row."""
        facts = {
            "actor": self.actor.name,
            "action": action,
            "model_key": self.model["key"],
            "model_id": self.model_id,
            "version": "" if version is None else str(version),
            "from_state": from_state,
            "to_state": to_state,
            "reason": reason,
            "forced": forced,
        }
        row = audit.append(self.connection, facts, evidence or {}, self.now_us)
        outbox.enqueue(self.connection, row)
        return row
