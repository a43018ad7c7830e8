"""Checks a redistribution plan and names every problem."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum

from tensorforge.cluster.elastic_config import RedistributionType
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WorkerId
from tensorforge.data.plan.balance import minimum_moves
from tensorforge.data.plan.intervals import NOTHING, IntervalSet, Range, union
from tensorforge.data.plan.plan import DataRedistributionPlan, DataTransfer, Ownership
from tensorforge.data.plan.shards import DataShard
from tensorforge.errors import ConflictError


class PlanProblemKind(Enum):
    """What is wrong with a plan."""

    WRONG_GENERATION = "wrong_generation"
    MISSING_WORKER = "missing_worker"
    UNKNOWN_WORKER = "unknown_worker"
    OVERLAP = "overlap"
    GAP = "gap"
    OUTSIDE = "outside"
    IMBALANCE = "imbalance"
    MISSING_TRANSFER = "missing_transfer"
    NEEDLESS_TRANSFER = "needless_transfer"
    DEAD_SOURCE = "dead_source"
    WRONG_SOURCE = "wrong_source"
    WRONG_SHARD = "wrong_shard"
    WRONG_PRIORITY = "wrong_priority"
    WRONG_TOTAL = "wrong_total"


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """One problem of a plan: its kind, and a description."""

    kind: PlanProblemKind
    message: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.message}"


@dataclass(frozen=True, slots=True)
class PlanValidation:
    """The problems that a validation found; true if there are none."""

    problems: tuple[PlanProblem, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Whether the plan may be executed."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.is_valid

    def require(self) -> None:
        """Raise `ConflictError` with every problem unless the plan is valid."""
        if self.problems:
            raise ConflictError("the plan is wrong: " + "; ".join(map(str, self.problems)))


def validate_plan(
    topology: ClusterTopology,
    plan: DataRedistributionPlan,
    *,
    ownership: Ownership | None = None,
    departing: Collection[WorkerId] = (),
) -> PlanValidation:
    """Check `plan` against the members and against `ownership`, by default the plan's own record of it.

    Units are shard numbers if the plan moves whole shards, otherwise positions.
    """
    check = _Check(topology, plan, plan.previous if ownership is None else ownership, departing)
    return PlanValidation(tuple(PlanProblem(kind, message) for kind, message in check.problems()))


_Problem = tuple[PlanProblemKind, str]


class _Check:
    def __init__(
        self,
        topology: ClusterTopology,
        plan: DataRedistributionPlan,
        held: Ownership,
        departing: Collection[WorkerId],
    ) -> None:
        self.topology, self.plan, self.held = topology, plan, held
        self.available = {*topology.workers, *departing}
        self.everything = (
            IntervalSet.span(plan.total_shards)
            if plan.whole_shards
            else IntervalSet.span(plan.dataset_size) - plan.consumed
        )
        self.assigned = {
            worker: IntervalSet.of(map(self.units, shards))
            for worker, shards in plan.worker_assignments.items()
        }

    def units(self, shard: DataShard) -> Range:
        """The shard as a range of the plan's units."""
        if self.plan.whole_shards:
            return shard.shard_id, shard.shard_id + 1
        return shard.start_index, shard.end_index

    def problems(self) -> Iterator[_Problem]:
        yield from self.members()
        yield from self.coverage()
        yield from self.numbers()
        yield from self.balance()
        yield from self.arrivals()
        yield from self.sources()
        yield from self.urgency()
        yield from self.totals()

    def members(self) -> Iterator[_Problem]:
        plan, topology = self.plan, self.topology
        if plan.generation != topology.epoch:
            yield (
                PlanProblemKind.WRONG_GENERATION,
                f"made for generation {plan.generation}, not for {topology.epoch}",
            )
        for worker in topology.workers:
            if worker not in plan.worker_assignments:
                yield PlanProblemKind.MISSING_WORKER, f"{worker} is assigned nothing"
        receivers = {*plan.worker_assignments, *(t.destination_worker for t in plan.transfers)}
        for worker in sorted(receivers - set(topology.workers)):
            yield PlanProblemKind.UNKNOWN_WORKER, f"{worker} is not a member but receives data"

    def coverage(self) -> Iterator[_Problem]:
        """The assigned shards contain every remaining position exactly once."""
        expected = IntervalSet.span(self.plan.dataset_size) - self.plan.consumed
        ranges = sorted(
            (shard.start_index, shard.end_index)
            for shards in self.plan.worker_assignments.values()
            for shard in shards
        )
        end = 0
        for start, stop in ranges:
            if start < min(end, stop):
                yield PlanProblemKind.OVERLAP, f"{start}-{min(end, stop)} is assigned twice"
            end = max(end, stop)
        covered = IntervalSet.of(ranges)
        if gap := expected - covered:
            yield PlanProblemKind.GAP, f"{gap} is assigned to nobody"
        if outside := covered - expected:
            yield (
                PlanProblemKind.OUTSIDE,
                f"{outside} is assigned, but consumed or not in the data set",
            )

    def numbers(self) -> Iterator[_Problem]:
        """The shard numbers are 0, 1, 2, …, each once, and their count is `total_shards`."""
        shards = [s for owned in self.plan.worker_assignments.values() for s in owned]
        if sorted(shard.shard_id for shard in shards) != list(range(len(shards))):
            yield PlanProblemKind.WRONG_SHARD, "shard numbers repeat or skip"
        if len(shards) != self.plan.total_shards:
            yield (
                PlanProblemKind.WRONG_TOTAL,
                f"total_shards = {self.plan.total_shards}, but {len(shards)} are assigned",
            )

    def balance(self) -> Iterator[_Problem]:
        loads = [self.assigned.get(worker, NOTHING).size for worker in self.topology.workers]
        if loads and max(loads) - min(loads) > 1:
            yield PlanProblemKind.IMBALANCE, f"loads range from {min(loads)} to {max(loads)}"

    def arrivals(self) -> Iterator[_Problem]:
        """Every unit that a worker is assigned and does not hold arrives exactly once, and nothing else."""
        arriving: dict[WorkerId, list[DataTransfer]] = {}
        for transfer in self.plan.transfers:
            arriving.setdefault(transfer.destination_worker, []).append(transfer)
        for worker, assigned in self.assigned.items():
            transfers = arriving.get(worker, [])
            needed = assigned - self.held.get(worker, NOTHING)
            ranges = [self.units(transfer.shard) for transfer in transfers]
            got = IntervalSet.of(ranges)
            if missing := needed - got:
                yield PlanProblemKind.MISSING_TRANSFER, f"nothing brings {missing} to {worker}"
            if got - needed or got.size != sum(stop - start for start, stop in ranges):
                yield (
                    PlanProblemKind.NEEDLESS_TRANSFER,
                    f"{worker} receives units that it already holds",
                )
            shards = {shard.shard_id: shard for shard in self.plan.worker_assignments[worker]}
            for transfer in transfers:
                if not self._is_part_of(transfer.shard, shards.get(transfer.shard.shard_id)):
                    yield (
                        PlanProblemKind.WRONG_SHARD,
                        f"{transfer} is not part of a shard assigned to its destination",
                    )

    def _is_part_of(self, part: DataShard, whole: DataShard | None) -> bool:
        if whole is None or self.plan.whole_shards:
            return part == whole
        return whole.start_index <= part.start_index and part.end_index <= whole.end_index

    def sources(self) -> Iterator[_Problem]:
        """Each transfer comes from an available holder, or from the origin if no holder is available."""
        served = union(held for worker, held in self.held.items() if worker in self.available)
        for transfer in self.plan.transfers:
            source, (start, stop) = transfer.source_worker, self.units(transfer.shard)
            if source is None:
                if served.touches(start, stop):
                    yield PlanProblemKind.WRONG_SOURCE, f"{transfer}, although a worker holds it"
            elif source not in self.available:
                yield PlanProblemKind.DEAD_SOURCE, f"{transfer}, but the source is no member"
            elif not self.held.get(source, NOTHING).covers(start, stop):
                yield PlanProblemKind.WRONG_SOURCE, f"{transfer}, but the source does not hold it"

    def urgency(self) -> Iterator[_Problem]:
        """At each destination, priorities fall in the order in which the ranges are read."""
        last: dict[WorkerId, int] = {}
        for transfer in sorted(self.plan.transfers, key=lambda t: t.shard.start_index):
            worker = transfer.destination_worker
            if transfer.priority > last.get(worker, transfer.priority):
                yield (
                    PlanProblemKind.WRONG_PRIORITY,
                    f"{transfer} is read later than a transfer of lower priority",
                )
            last[worker] = transfer.priority

    def totals(self) -> Iterator[_Problem]:
        plan = self.plan
        workers = self.topology.workers
        held = [(self.held.get(worker, NOTHING) & self.everything).size for worker in workers]
        least = minimum_moves(held, self.everything.size) if workers else 0
        sizes = [stop - start for start, stop in (self.units(t.shard) for t in plan.transfers)]
        expected = {
            "moved_samples": sum(transfer.shard.size for transfer in plan.transfers),
            "moved_units": sum(sizes),
            "minimum_moves": least,
        }
        for name, value in expected.items():
            if getattr(plan, name) != value:
                yield PlanProblemKind.WRONG_TOTAL, f"{name} = {getattr(plan, name)}, not {value}"
        if plan.strategy is RedistributionType.INCREMENTAL and sum(sizes) != least:
            yield (
                PlanProblemKind.WRONG_TOTAL,
                f"an incremental plan moves {least}, not {sum(sizes)}",
            )
