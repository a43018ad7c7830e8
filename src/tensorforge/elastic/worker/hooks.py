"""Where a worker meets what it does not own: the training code's state, and plans that move data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tensorforge.cluster.workers import WorkerId
from tensorforge.errors import ConflictError


class Shard(Protocol):
    """What a worker needs to know of a shard."""

    @property
    def shard_id(self) -> int:
        """Its number."""


class RedistributionPlan(Protocol):
    """What a worker needs to know of a plan; `tensorforge.data.DataRedistributionPlan` is one."""

    @property
    def worker_assignments(self) -> Mapping[WorkerId, Sequence[Shard]]:
        """Every worker of the new topology, and the shards it owns from now on."""

    @property
    def total_shards(self) -> int:
        """How many shards there are."""


class StateHooks:
    """How `synchronize_state` reaches the training code; subclass it and override what you have."""

    def load_optimizer_state(self, encoded: bytes) -> None:
        """Apply an optimizer state. There is no default: a state must not be dropped silently."""
        raise ConflictError(
            f"{len(encoded)} bytes of optimizer state arrived, but nothing here can load them; "
            "register hooks that override load_optimizer_state"
        )

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use this rate from the next step on."""

    def set_counters(self, epoch: int, step: int) -> None:
        """Continue after this step of this epoch."""
