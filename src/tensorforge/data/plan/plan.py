"""A redistribution plan: which worker owns which shards afterwards, and the transfers that lead there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tensorforge.cluster.elastic_config import RedistributionType
from tensorforge.cluster.workers import WorkerId
from tensorforge.data.plan.intervals import NOTHING, IntervalSet
from tensorforge.data.plan.shards import DataShard

Ownership = Mapping[WorkerId, IntervalSet]
"""The positions that each worker holds. No position has two holders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTransfer:
    """One range to be transferred. `source_worker` is `None` for the origin store: no live worker holds it.

    A range with a higher `priority` is read earlier in training. `estimated_completion` is in seconds from
    the start of the plan; `None` if no transfer rate was measured yet.
    """

    source_worker: WorkerId | None
    destination_worker: WorkerId
    shard: DataShard
    priority: int = 0
    estimated_completion: float | None = None

    def __str__(self) -> str:
        source = "the origin" if self.source_worker is None else str(self.source_worker)
        return f"{self.shard} from {source} to {self.destination_worker}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRedistributionPlan:
    """A complete plan for one generation.

    `worker_assignments` lists, for every worker of the new topology, every shard that it owns afterwards,
    kept or moved; together they are the data set without `consumed`. A unit is a sample, or a shard if
    `whole_shards`: loads differ by at most one unit, `moved_units` is the number this plan moves, and
    `minimum_moves` is the smallest number any balanced plan can move. `previous` is the ownership, in units,
    that the plan starts from.
    """

    transfers: tuple[DataTransfer, ...]
    worker_assignments: Mapping[WorkerId, tuple[DataShard, ...]]
    total_shards: int
    moved_samples: int
    moved_units: int
    minimum_moves: int
    dataset_size: int
    generation: int
    strategy: RedistributionType
    whole_shards: bool = False
    consumed: IntervalSet = NOTHING
    previous: Ownership = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("worker_assignments", "previous"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def transfers_to(self, worker: WorkerId) -> tuple[DataTransfer, ...]:
        """The transfers that `worker` has to fetch, most urgent first."""
        mine = (move for move in self.transfers if move.destination_worker == worker)
        return tuple(sorted(mine, key=lambda move: (-move.priority, move.shard.start_index)))

    @property
    def ownership(self) -> dict[WorkerId, IntervalSet]:
        """Which positions each worker holds once the plan is executed."""
        return {worker: positions_of(s) for worker, s in self.worker_assignments.items()}

    def __str__(self) -> str:
        unit = "shards" if self.whole_shards else "samples"
        return (
            f"generation {self.generation}, {self.strategy.value}: {len(self.worker_assignments)} workers, "
            f"{len(self.transfers)} transfers, {self.moved_units} {unit} moved, minimum {self.minimum_moves}"
        )


def positions_of(shards: tuple[DataShard, ...]) -> IntervalSet:
    """The positions that the shards cover."""
    return IntervalSet.of((shard.start_index, shard.end_index) for shard in shards)
