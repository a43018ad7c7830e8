"""The training state that a newcomer needs to go on with the other members."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tensorforge.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalTrainingState:
    """The counters and settings that all members share. `optimizer_state` is encoded without pickle."""

    current_epoch: int
    current_step: int
    learning_rate: float
    global_batch_size: int
    active_worker_count: int
    state_timestamp: datetime = field(default_factory=lambda: datetime.now(UTC))
    optimizer_state: bytes | None = None

    def __post_init__(self) -> None:
        counters = ("current_epoch", "current_step", "global_batch_size", "active_worker_count")
        for name in counters:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidInputError(f"{name} = {value!r}: must be a whole number, 0 or more")
        if not math.isfinite(self.learning_rate) or self.learning_rate < 0:
            raise InvalidInputError(
                f"learning_rate = {self.learning_rate!r}: must be a number, 0 or more"
            )
