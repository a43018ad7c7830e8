"""The change from one topology to the next, and its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from tensorforge.cluster.elastic_config import RescaleType
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WorkerId
from tensorforge.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class RescalingEvent:
    """One rescale: the topologies before and after, who joined, who left, and the reason.

    `urgent`: a member is lost, so the current step cannot be finished. Otherwise (a join, a leave, another
    target) all members, leavers included, finish it first.
    """

    type: RescaleType
    old_topology: ClusterTopology
    new_topology: ClusterTopology
    added_workers: tuple[WorkerId, ...] = ()
    removed_workers: tuple[WorkerId, ...] = ()
    trigger_reason: str = ""
    urgent: bool = True
    event_time: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        if self.new_topology.epoch <= self.old_topology.epoch:
            raise InvalidInputError(
                f"new_topology: generation {self.new_topology.epoch} does not follow "
                f"{self.old_topology.epoch}"
            )
        old, new = set(self.old_topology.workers), set(self.new_topology.workers)
        if set(self.added_workers) != new - old:
            raise InvalidInputError(
                "added_workers: must be the workers that only the new topology has"
            )
        if set(self.removed_workers) != old - new:
            raise InvalidInputError(
                "removed_workers: must be the workers that only the old topology has"
            )

    @classmethod
    def between(
        cls,
        old: ClusterTopology,
        new: ClusterTopology,
        reason: str,
        *,
        urgent: bool = True,
        at: datetime | None = None,
    ) -> RescalingEvent:
        """The event that leads from `old` to `new`; its type and its lists are derived from them."""
        added = tuple(worker for worker in new.workers if worker not in old)
        removed = tuple(worker for worker in old.workers if worker not in new)
        return cls(
            type=RescaleType.of(old.world_size, new.world_size),
            old_topology=old,
            new_topology=new,
            added_workers=added,
            removed_workers=removed,
            trigger_reason=reason,
            urgent=urgent,
            event_time=at or datetime.now(UTC),
        )
