"""The training state that a newcomer needs to go on with the other members."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from tensorforge.validation import finite_number, whole_number


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
            whole_number(name, getattr(self, name), least=0)
        finite_number("learning_rate", self.learning_rate, least=0)
