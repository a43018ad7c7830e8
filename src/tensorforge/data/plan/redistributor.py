"""Plans the redistribution of data from one topology to the next."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from tensorforge.cluster.elastic_config import ElasticTrainingConfig, RedistributionType
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WorkerId
from tensorforge.data.plan.balance import deal, minimum_moves, move_least
from tensorforge.data.plan.intervals import NOTHING, IntervalSet
from tensorforge.data.plan.plan import DataRedistributionPlan, DataTransfer, Ownership
from tensorforge.data.plan.plan_validation import PlanValidation, validate_plan
from tensorforge.data.plan.shards import DataShard
from tensorforge.errors import ConfigurationError, InvalidInputError
from tensorforge.validation import whole_number

Piece = tuple[int, int, WorkerId | None]
"""A range and the worker that serves it; `None` is the origin."""


class ShardMover(Protocol):
    """Executes single transfers; `DataTransferManager` is one."""

    def transfer(self, transfer: DataTransfer, *, generation: int | None = None) -> object:
        """Transfer the shard to its destination, or raise."""
        ...


class DataRedistributor:
    """Plans which worker holds which data after a change of members. Planning moves no data.

    `mover` executes the transfers of `transfer_data_shards`; planning does not need one.
    """

    def __init__(self, config: ElasticTrainingConfig, mover: ShardMover | None = None) -> None:
        config.validate()
        self._config = config
        self._mover = mover

    def calculate_plan(
        self,
        old: ClusterTopology,
        new: ClusterTopology,
        total_dataset_size: int,
        *,
        ownership: Ownership | None = None,
        consumed: IntervalSet = NOTHING,
        departing: Collection[WorkerId] = (),
        samples_per_second: float | None = None,
    ) -> DataRedistributionPlan:
        """Plan for the samples that are not consumed; loads differ by at most one sample.

        Without `ownership`, each worker of `old` holds an even, contiguous share in order of rank. Samples
        that no worker of `new` and no `departing` worker (leaving, but still serving) holds come from the
        origin. `samples_per_second` is the measured rate at which one destination receives.
        """
        whole_number("total_dataset_size", total_dataset_size, least=0)
        everything = IntervalSet.span(total_dataset_size)
        if not everything.issuperset(consumed):
            raise InvalidInputError(
                f"consumed: {consumed} reaches beyond the {total_dataset_size} samples"
            )
        if ownership is None:
            ownership = _even_ownership(old, everything)
        remaining = everything - consumed
        held = {worker: owned & remaining for worker, owned in ownership.items()}
        owners = _owners(held, remaining, {*new.workers, *departing})
        assignments = _number(new.workers, self._assign(new, held, remaining, merge=True))
        transfers = list(_transfers(assignments, owners))
        moved = sum(transfer.shard.size for transfer in transfers)
        return DataRedistributionPlan(
            transfers=_estimate(transfers, samples_per_second),
            worker_assignments=assignments,
            total_shards=sum(len(shards) for shards in assignments.values()),
            moved_samples=moved,
            moved_units=moved,
            minimum_moves=_minimum(new, held, remaining),
            dataset_size=total_dataset_size,
            generation=new.epoch,
            strategy=self._config.redistribution_type,
            consumed=consumed,
            previous=ownership,
        )

    def calculate_shard_plan(
        self,
        old: ClusterTopology,
        new: ClusterTopology,
        shards: Sequence[DataShard],
        *,
        ownership: Mapping[WorkerId, Iterable[int]] | None = None,
        departing: Collection[WorkerId] = (),
        samples_per_second: float | None = None,
    ) -> DataRedistributionPlan:
        """Plan without splitting a shard; loads differ by at most one shard.

        `shards` are numbered from 0 and cover the data set in order, as `partition` makes them;
        `ownership` lists the shard numbers that each worker holds.
        """
        _check_partition(shards)
        everything = IntervalSet.span(len(shards))
        held = (
            _even_ownership(old, everything)
            if ownership is None
            else {w: IntervalSet.of((n, n + 1) for n in ids) for w, ids in ownership.items()}
        )
        owners = _owners(held, everything, {*new.workers, *departing})
        final = self._assign(new, held, everything)
        assignments = {
            worker: tuple(shards[n] for start, stop in units for n in range(start, stop))
            for worker, units in zip(new.workers, final, strict=True)
        }
        transfers = list(_shard_transfers(assignments, owners))
        return DataRedistributionPlan(
            transfers=_estimate(transfers, samples_per_second),
            worker_assignments=assignments,
            total_shards=len(shards),
            moved_samples=sum(transfer.shard.size for transfer in transfers),
            moved_units=len(transfers),
            minimum_moves=_minimum(new, held, everything),
            dataset_size=shards[-1].end_index,
            generation=new.epoch,
            strategy=self._config.redistribution_type,
            whole_shards=True,
            previous=held,
        )

    def validate_redistribution(
        self,
        state: ClusterTopology,
        plan: DataRedistributionPlan,
        *,
        ownership: Ownership | None = None,
        departing: Collection[WorkerId] = (),
    ) -> PlanValidation:
        """Check `plan` against the topology `state`; the answer is true if there are no problems.

        `ownership` is what each worker really holds (shard numbers for a plan of whole shards); by default
        the ownership that the plan records.
        """
        return validate_plan(state, plan, ownership=ownership, departing=departing)

    def transfer_data_shards(
        self,
        source: WorkerId | None,
        destination: WorkerId,
        shard: DataShard,
        *,
        generation: int | None = None,
    ) -> None:
        """Transfer one shard now and return when it has arrived and is verified."""
        if self._mover is None:
            raise ConfigurationError("mover", None, "a redistributor without a mover can only plan")
        transfer = DataTransfer(source_worker=source, destination_worker=destination, shard=shard)
        self._mover.transfer(transfer, generation=generation)

    def _assign(
        self,
        new: ClusterTopology,
        held: Ownership,
        remaining: IntervalSet,
        *,
        merge: bool = False,  # not for whole shards: they never have more ranges than shards
    ) -> list[IntervalSet]:
        if not new.workers:
            raise InvalidInputError(
                f"the new topology (generation {new.epoch}) has no workers to hold the data"
            )
        if self._config.redistribution_type is RedistributionType.FULL_RESHUFFLE:
            return deal(remaining, len(new.workers))
        parts = [held.get(worker, NOTHING) for worker in new.workers]
        return move_least(parts, remaining, merge=merge)


def _check_partition(shards: Sequence[DataShard]) -> None:
    if not shards:
        raise InvalidInputError("shards: there must be at least 1")
    end = 0
    for number, shard in enumerate(shards):
        if shard.shard_id != number or shard.start_index != end:
            raise InvalidInputError(f"shards: {shard} at place {number} does not start at {end}")
        end = shard.end_index


def _even_ownership(old: ClusterTopology, everything: IntervalSet) -> dict[WorkerId, IntervalSet]:
    if not old.workers:
        return {}
    return dict(zip(old.workers, deal(everything, len(old.workers)), strict=True))


def _minimum(new: ClusterTopology, held: Ownership, remaining: IntervalSet) -> int:
    return minimum_moves([held.get(worker, NOTHING).size for worker in new.workers], remaining.size)


def _owners(
    held: Ownership, remaining: IntervalSet, available: Collection[WorkerId]
) -> list[Piece]:
    """Every range in order with the worker that serves it; `None` if its holder is not available."""
    pieces: list[Piece] = []
    for worker, ranges in held.items():
        source = worker if worker in available else None
        pieces.extend((start, stop, source) for start, stop in ranges)
    unheld = remaining - IntervalSet.of((start, stop) for start, stop, _ in pieces)
    pieces.extend((start, stop, None) for start, stop in unheld)
    pieces.sort(key=lambda piece: piece[0])
    end = 0
    for start, stop, _ in pieces:
        if start < end:
            raise InvalidInputError(f"ownership: [{start}, {min(stop, end)}) has two holders")
        end = stop
    return pieces


def _number(
    workers: Sequence[WorkerId], final: Sequence[IntervalSet]
) -> dict[WorkerId, tuple[DataShard, ...]]:
    """Turn each worker's ranges into shards, numbered in the order of their positions."""
    ordered = sorted(
        (start, stop, rank) for rank, ranges in enumerate(final) for start, stop in ranges
    )
    shards: list[list[DataShard]] = [[] for _ in workers]
    for number, (start, stop, rank) in enumerate(ordered):
        shards[rank].append(DataShard(number, start, stop))
    return {worker: tuple(mine) for worker, mine in zip(workers, shards, strict=True)}


def _transfers(
    assignments: Mapping[WorkerId, tuple[DataShard, ...]], owners: Sequence[Piece]
) -> Iterable[DataTransfer]:
    """A transfer for each part of an assigned shard that its worker does not hold.

    The priority is the largest load minus the number of samples that the worker reads before the part.
    """
    starts = [start for start, _, _ in owners]
    largest = max(sum(shard.size for shard in shards) for shards in assignments.values())
    for worker, shards in assignments.items():
        ahead = 0
        for shard in shards:
            index = bisect_right(starts, shard.start_index) - 1
            while index < len(owners) and owners[index][0] < shard.end_index:
                start, stop, source = owners[index]
                index += 1
                if source is worker or source == worker:
                    continue
                start, stop = max(start, shard.start_index), min(stop, shard.end_index)
                yield DataTransfer(
                    source_worker=source,
                    destination_worker=worker,
                    shard=DataShard(shard.shard_id, start, stop),
                    priority=largest - ahead - (start - shard.start_index),
                )
            ahead += shard.size


def _shard_transfers(
    assignments: Mapping[WorkerId, tuple[DataShard, ...]], owners: Sequence[Piece]
) -> Iterable[DataTransfer]:
    source_of = {n: source for start, stop, source in owners for n in range(start, stop)}
    largest = max(len(shards) for shards in assignments.values())
    for worker, shards in assignments.items():
        for ahead, shard in enumerate(shards):
            source = source_of[shard.shard_id]
            if source != worker:
                yield DataTransfer(
                    source_worker=source,
                    destination_worker=worker,
                    shard=shard,
                    priority=largest - ahead,
                )


def _estimate(
    transfers: Iterable[DataTransfer], samples_per_second: float | None
) -> tuple[DataTransfer, ...]:
    """Sort by priority and add the time after which the destination will have received each transfer."""
    ordered = sorted(transfers, key=lambda move: (-move.priority, move.shard.start_index))
    if samples_per_second is None:
        return tuple(ordered)
    if not samples_per_second > 0:
        raise InvalidInputError(f"samples_per_second = {samples_per_second}: must be positive")
    arrived: dict[WorkerId, int] = {}
    timed = []
    for move in ordered:
        total = arrived.get(move.destination_worker, 0) + move.shard.size
        arrived[move.destination_worker] = total
        timed.append(replace(move, estimated_completion=total / samples_per_second))
    return tuple(timed)
