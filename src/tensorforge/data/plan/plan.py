"""A redistribution as frozen data: who has what in the end, and what moves from where to get there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tensorforge.cluster.elastic_config import RedistributionType
from tensorforge.cluster.workers import WorkerId
from tensorforge.data.plan.intervals import NOTHING, IntervalSet
from tensorforge.data.plan.shards import DataShard

Ownership = Mapping[WorkerId, IntervalSet]
"""The positions that each worker holds; nobody holds what another one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTransfer:
    """One range on its way. `source_worker` is `None` for the origin store: the owner is gone.

    A higher `priority` is needed earlier in training. `estimated_completion` is in seconds from the
    start of the plan, `None` while no rate was measured.
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

    `worker_assignments` has every worker of the new topology with every shard it owns in the end, kept
    or moved; together they are the data set without `consumed`. A unit is a sample, or with `whole_shards` a
    shard: loads differ by at most one unit, `moved_units` counts what this plan moves and `minimum_moves`
    what no plan could do without. `previous` is who held what when the plan was made, in units.
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
        """What `worker` has to fetch, most urgent first."""
        mine = (move for move in self.transfers if move.destination_worker == worker)
        return tuple(sorted(mine, key=lambda move: (-move.priority, move.shard.start_index)))

    @property
    def ownership(self) -> dict[WorkerId, IntervalSet]:
        """Who holds what once the plan is done: the next plan's starting point."""
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
