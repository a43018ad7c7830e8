"""The members of one generation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tensorforge.cluster.workers import WorkerId
from tensorforge.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
)
from tensorforge.validation import whole_number


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTopology:
    """The members in order of rank. `epoch` is the number of the generation; it only grows.

    A topology never changes; `add_worker`, `remove_worker` and `succeed` return the next one.
    """

    workers: tuple[WorkerId, ...] = ()
    epoch: int = 0
    last_updated: datetime = field(default_factory=_now)

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", tuple(self.workers))
        whole_number("epoch", self.epoch, least=0)
        if len({worker.id for worker in self.workers}) != len(self.workers):
            raise InvalidInputError("workers: two members have the same id")

    @property
    def world_size(self) -> int:
        """How many members there are."""
        return len(self.workers)

    def __contains__(self, worker: object) -> bool:
        return worker in self.workers

    def rank_of(self, worker: WorkerId) -> int:
        """The rank of a member; anybody else is a `NotFoundError`."""
        try:
            return self.workers.index(worker)
        except ValueError:
            raise NotFoundError(f"{worker} is not a member of generation {self.epoch}") from None

    def add_worker(self, worker: WorkerId, *, at: datetime | None = None) -> ClusterTopology:
        """The next generation, in which `worker` has the last rank."""
        if any(member.id == worker.id for member in self.workers):
            raise AlreadyExistsError(f"{worker.id} is already a member of generation {self.epoch}")
        return self.succeed((*self.workers, worker), at=at)

    def remove_worker(self, worker: WorkerId, *, at: datetime | None = None) -> ClusterTopology:
        """The next generation, without `worker`; the others keep their order."""
        self.rank_of(worker)
        return self.succeed((member for member in self.workers if member != worker), at=at)

    def succeed(
        self, workers: Iterable[WorkerId], *, at: datetime | None = None
    ) -> ClusterTopology:
        """The next generation, with these members."""
        return ClusterTopology(
            workers=tuple(workers), epoch=self.epoch + 1, last_updated=at or _now()
        )
