"""Plans are balanced, move the least, and every change of a valid plan is found."""

import itertools
from dataclasses import replace
from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorforge.cluster.elastic_config import ElasticTrainingConfig, RedistributionType
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WorkerId
from tensorforge.data import DataRedistributor, DataShard, IntervalSet, PlanProblemKind, partition
from tensorforge.data.plan.balance import deal, minimum_moves, move_least
from tensorforge.data.plan.intervals import NOTHING
from tensorforge.encoding import decode, encode

WORKERS = [WorkerId(f"w{number}", "127.0.0.1", number) for number in range(12)]
PLANNERS = {
    strategy: DataRedistributor(ElasticTrainingConfig(redistribution_type=strategy))
    for strategy in RedistributionType
}


@st.composite
def situations(draw, largest=40, workers=6):
    """Old and new members, who holds what (some held by nobody), and what is consumed."""
    size = draw(st.integers(0, largest))
    old = draw(st.lists(st.sampled_from(WORKERS[:workers]), unique=True))
    new = draw(st.lists(st.sampled_from(WORKERS[:workers]), unique=True, min_size=1))
    departing = [worker for worker in old if worker not in new and draw(st.booleans())]
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=10)))
    held = dict.fromkeys(old, NOTHING)
    consumed = NOTHING
    for start, stop in itertools.pairwise([0, *cuts, size]):
        piece = IntervalSet.of([(start, stop)])
        fate = draw(st.sampled_from([*old, None, "consumed"]))
        if fate == "consumed":
            consumed = consumed | piece
        elif fate is not None:
            held[fate] = held[fate] | piece
    before = ClusterTopology(workers=old, epoch=3)
    return before, before.succeed(new), size, held, consumed, departing


def make_plan(strategy, situation):
    old, new, size, held, consumed, departing = situation
    return PLANNERS[strategy].calculate_plan(
        old, new, size, ownership=held, consumed=consumed, departing=departing
    )


def problems(situation, plan):
    _, new, _, held, _, departing = situation
    found = PLANNERS[plan.strategy].validate_redistribution(
        new, plan, ownership=held, departing=departing
    )
    return {problem.kind for problem in found.problems}


@given(situations(), st.sampled_from(RedistributionType))
@settings(max_examples=300)
def test_a_plan_is_complete_balanced_and_valid(situation, strategy):
    _, new, size, held, consumed, departing = situation
    plan = make_plan(strategy, situation)
    assert problems(situation, plan) == set()
    assert set(plan.worker_assignments) == set(new.workers)
    positions = sorted(
        position
        for shards in plan.worker_assignments.values()
        for shard in shards
        for position in range(shard.start_index, shard.end_index)
    )
    remaining = IntervalSet.span(size) - consumed
    assert positions == [p for start, stop in remaining for p in range(start, stop)]
    loads = [part.size for part in plan.ownership.values()]
    assert max(loads) - min(loads) <= 1
    for transfer in plan.transfers:
        source, shard = transfer.source_worker, transfer.shard
        if source is not None:
            assert held[source].covers(shard.start_index, shard.end_index)
            assert source in {*new.workers, *departing}
    assert decode(encode(plan), type(plan)) == plan


@given(situations(largest=9, workers=4))
@settings(max_examples=200)
def test_an_incremental_plan_moves_the_brute_force_minimum(situation):
    _, new, size, held, consumed, _ = situation
    plan = make_plan(RedistributionType.INCREMENTAL, situation)
    counts = tuple((held.get(worker, NOTHING) - consumed).size for worker in new.workers)
    remaining = size - consumed.size
    assert plan.moved_samples == plan.minimum_moves == fewest_moves(counts, remaining)
    full = make_plan(RedistributionType.FULL_RESHUFFLE, situation)
    assert full.moved_samples >= full.minimum_moves == plan.minimum_moves


@cache
def fewest_moves(held, total):
    """Try every way to end with loads that differ by at most one."""
    best = total
    for final in itertools.product(range(total + 1), repeat=len(held)):
        if sum(final) == total and max(final) - min(final) <= 1:
            kept = sum(min(pair) for pair in zip(held, final, strict=True))
            best = min(best, total - kept)
    return best


@given(situations(largest=10**12, workers=12))
def test_large_plans_move_the_minimum_too(situation):
    _, new, size, held, consumed, _ = situation
    plan = make_plan(RedistributionType.INCREMENTAL, situation)
    remaining = IntervalSet.span(size) - consumed
    counts = [(held.get(worker, NOTHING) & remaining).size for worker in new.workers]
    share, rest = divmod(remaining.size, len(counts))
    kept = sum(min(count, share) for count in counts)
    kept += min(rest, sum(count >= share + 1 for count in counts))
    assert plan.moved_samples == plan.minimum_moves == remaining.size - kept
    assert plan.minimum_moves == minimum_moves(counts, remaining.size)
    assert problems(situation, plan) == set()


@given(st.data(), situations())
def test_what_the_survivors_keep_is_what_they_read_first(data, situation):
    _, new, _, held, consumed, _ = situation
    plan = make_plan(RedistributionType.INCREMENTAL, situation)
    for worker in new.workers:
        had = held.get(worker, NOTHING) - consumed
        kept = plan.ownership[worker] & had
        if (
            len(had.ranges) <= 8
        ):  # of more it keeps the largest, so that they do not become ever more
            assert kept == had.first(kept.size)


@given(
    size=st.integers(0, 10**6),
    pieces=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 6)), max_size=80),
    workers=st.integers(1, 6),
)
def test_merging_changes_who_receives_what_but_never_how_much_moves(size, pieces, workers):
    everything = IntervalSet.span(size)
    cuts = sorted({0, size, *(at for at, _ in pieces if at < size)})
    owners = [rank for _, rank in pieces] or [0]
    held = [
        IntervalSet.of(
            span
            for number, span in enumerate(itertools.pairwise(cuts))
            if owners[number % len(owners)] == rank
        )
        for rank in range(workers)
    ]  # ranks beyond the workers are the dead
    final = move_least(held, everything, merge=True)
    assert IntervalSet.of(span for part in final for span in part) == everything
    assert sum(part.size for part in final) == size
    assert max(part.size for part in final) - min(part.size for part in final) <= 1
    moved = size - sum((now & had).size for now, had in zip(final, held, strict=True))
    assert moved == minimum_moves([part.size for part in held], size)


def test_ranges_stay_few_over_a_hundred_changes():
    random = Random(1)
    everything = IntervalSet.span(10**9)
    held = dict(enumerate(deal(everything, 100)))
    plain = dict(held)
    counts, without = [], 0
    for change in range(100):
        survivors = random.sample(sorted(held), random.randint(90, len(held)))
        joined = range(1000 + 100 * change, 1000 + 100 * change + random.randint(0, 12))
        members = [*survivors, *joined][:110]
        parts = move_least([held.get(w, NOTHING) for w in members], everything, merge=True)
        held = dict(zip(members, parts, strict=True))
        others = move_least([plain.get(w, NOTHING) for w in members], everything)
        plain = dict(zip(members, others, strict=True))
        counts.append(sum(len(part.ranges) for part in parts))
        without = sum(len(part.ranges) for part in others)
    assert max(counts[50:]) < 1.5 * max(counts[:50])  # it levels off
    assert counts[-1] < 0.5 * without


@given(
    size=st.integers(0, 60),
    count=st.integers(1, 24),
    old=st.lists(st.sampled_from(WORKERS), unique=True),
    steps=st.lists(st.lists(st.sampled_from(WORKERS), unique=True, min_size=1), min_size=1),
    strategy=st.sampled_from(RedistributionType),
)
def test_whole_shards_are_never_cut_whatever_the_history(size, count, old, steps, strategy):
    shards = partition(size, count)
    planner, topology, ownership = PLANNERS[strategy], ClusterTopology(workers=old), None
    for members in steps:
        following = topology.succeed(members)
        plan = planner.calculate_shard_plan(topology, following, shards, ownership=ownership)
        assert planner.validate_redistribution(following, plan).problems == ()
        owned = [shard for mine in plan.worker_assignments.values() for shard in mine]
        assert sorted(owned) == list(shards)
        loads = [len(mine) for mine in plan.worker_assignments.values()]
        assert max(loads) - min(loads) <= 1
        assert all(transfer.shard in shards for transfer in plan.transfers)
        if strategy is RedistributionType.INCREMENTAL:
            assert plan.moved_units == len(plan.transfers) == plan.minimum_moves
        ownership = {w: [s.shard_id for s in mine] for w, mine in plan.worker_assignments.items()}
        topology = following


STRANGER, GONE = WorkerId("stranger", "h", 1), WorkerId("gone", "h", 2)


def mutations(plan):
    """Plans that each differ from a valid one in a way that must not pass, with what must be found."""
    yield from changed_totals(plan)
    yield from changed_assignments(plan)
    for index in range(len(plan.transfers)):
        yield from changed_transfers(plan, index)


def changed_totals(plan):
    yield PlanProblemKind.WRONG_GENERATION, replace(plan, generation=plan.generation + 1)
    for name in ("total_shards", "moved_samples", "moved_units", "minimum_moves"):
        for change in (-1, 1):
            changed = {name: getattr(plan, name) + change}
            yield PlanProblemKind.WRONG_TOTAL, replace(plan, **changed)
    yield PlanProblemKind.GAP, replace(plan, dataset_size=plan.dataset_size + 1)
    last = plan.dataset_size - 1
    if last >= 0 and last not in plan.consumed:
        yield PlanProblemKind.OUTSIDE, replace(plan, dataset_size=last)


def changed_assignments(plan):
    owned = plan.worker_assignments

    def assign(**changes):
        named = {worker: changes.get(worker.id, shards) for worker, shards in owned.items()}
        return replace(plan, worker_assignments=named)

    giver = max(owned, key=lambda worker: sum(shard.size for shard in owned[worker]))
    fewer = {worker: shards for worker, shards in owned.items() if worker != giver}
    yield PlanProblemKind.MISSING_WORKER, replace(plan, worker_assignments=fewer)
    more = {**owned, STRANGER: ()}
    yield PlanProblemKind.UNKNOWN_WORKER, replace(plan, worker_assignments=more)
    shard = next((shard for shard in owned[giver] if shard.size), None)
    if shard is None:
        return
    others = tuple(other for other in owned[giver] if other != shard)
    shorter = replace(shard, end_index=shard.end_index - 1)
    renamed = replace(shard, shard_id=99)
    yield PlanProblemKind.GAP, assign(**{giver.id: (*others, shorter)})
    yield PlanProblemKind.GAP, assign(**{giver.id: others})
    yield PlanProblemKind.OVERLAP, assign(**{giver.id: (*owned[giver], renamed)})
    yield PlanProblemKind.WRONG_SHARD, assign(**{giver.id: (*others, renamed)})
    start = shard.shard_id if plan.whole_shards else shard.start_index
    stop = start + (1 if plan.whole_shards else shard.size)
    for taker, shards in owned.items():
        if taker != giver and not plan.previous.get(taker, NOTHING).covers(start, stop):
            changed = assign(**{giver.id: others, taker.id: (*shards, shard)})
            yield PlanProblemKind.MISSING_TRANSFER, changed


def changed_transfers(plan, index):
    move = plan.transfers[index]
    without = (*plan.transfers[:index], *plan.transfers[index + 1 :])

    def swap(**changes):
        return replace(plan, transfers=(*without, replace(move, **changes)))

    yield PlanProblemKind.MISSING_TRANSFER, replace(plan, transfers=without)
    yield PlanProblemKind.NEEDLESS_TRANSFER, replace(plan, transfers=(*plan.transfers, move))
    yield PlanProblemKind.DEAD_SOURCE, swap(source_worker=GONE)
    yield PlanProblemKind.WRONG_SOURCE, swap(source_worker=move.destination_worker)
    if move.source_worker is not None:
        yield PlanProblemKind.WRONG_SOURCE, swap(source_worker=None)
    yield PlanProblemKind.UNKNOWN_WORKER, swap(destination_worker=STRANGER)
    yield PlanProblemKind.WRONG_SHARD, swap(shard=replace(move.shard, shard_id=98))
    if move.shard.size:
        shorter = replace(move.shard, end_index=move.shard.end_index - 1)
        yield PlanProblemKind.WRONG_TOTAL, swap(shard=shorter)
        longer = replace(move.shard, end_index=plan.dataset_size + 1)
        yield PlanProblemKind.WRONG_SHARD, swap(shard=longer)
    later = [
        other.priority
        for other in without
        if other.destination_worker == move.destination_worker
        and other.shard.start_index > move.shard.start_index
    ]
    if later:
        yield PlanProblemKind.WRONG_PRIORITY, swap(priority=min(later) - 1)


@given(situations(), st.sampled_from(RedistributionType))
@settings(max_examples=150)
def test_validation_finds_every_mutation_of_a_plan(situation, strategy):
    for expected, mutated in mutations(make_plan(strategy, situation)):
        assert expected in problems(situation, mutated), (expected, mutated)


@given(
    count=st.integers(1, 24),
    old=st.lists(st.sampled_from(WORKERS[:5]), unique=True),
    new=st.lists(st.sampled_from(WORKERS[:5]), unique=True, min_size=1),
    strategy=st.sampled_from(RedistributionType),
)
def test_validation_finds_every_mutation_of_a_plan_of_whole_shards(count, old, new, strategy):
    before = ClusterTopology(workers=old)
    after = before.succeed(new)
    plan = PLANNERS[strategy].calculate_shard_plan(before, after, partition(100, count))
    for expected, mutated in mutations(plan):
        found = PLANNERS[strategy].validate_redistribution(after, mutated)
        assert expected in {problem.kind for problem in found.problems}, (expected, mutated)


@pytest.mark.parametrize("strategy", RedistributionType)
def test_an_unbalanced_plan_is_found(strategy):
    topology = ClusterTopology(workers=WORKERS[:3], epoch=1)
    plan = PLANNERS[strategy].calculate_plan(ClusterTopology(), topology, 9)
    first, second, third = plan.worker_assignments
    shards = plan.worker_assignments
    merged = DataShard(0, shards[first][0].start_index, shards[second][0].end_index)
    unbalanced = replace(
        plan,
        worker_assignments={first: (merged,), second: (), third: shards[third]},
        total_shards=2,
    )
    found = PLANNERS[strategy].validate_redistribution(topology, unbalanced)
    assert PlanProblemKind.IMBALANCE in {problem.kind for problem in found.problems}
