"""The interfaces of a worker to the training code's state and to plans that move data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tensorforge.cluster.workers import WorkerId
from tensorforge.errors import ConflictError


class Shard(Protocol):
    """The part of a shard that a worker reads."""

    @property
    def shard_id(self) -> int:
        """The number of the shard."""


class RedistributionPlan(Protocol):
    """The part of a plan that a worker reads; `tensorforge.data.DataRedistributionPlan` has it."""

    @property
    def worker_assignments(self) -> Mapping[WorkerId, Sequence[Shard]]:
        """The shards of every worker of the new topology."""

    @property
    def total_shards(self) -> int:
        """How many shards there are."""


class StateHooks:
    """What `synchronize_state` calls in the training code; override the methods that you need."""

    def load_optimizer_state(self, encoded: bytes) -> None:
        """Apply an optimizer state. The default raises, so that no state is dropped silently."""
        raise ConflictError(
            f"{len(encoded)} bytes of optimizer state arrived, but nothing here can load them; "
            "register hooks that override load_optimizer_state"
        )

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use this rate from the next step on."""

    def set_counters(self, epoch: int, step: int) -> None:
        """Go on after this step of this epoch."""
