import pytest

from tensorforge.cluster.elastic_config import ElasticTrainingConfig, RedistributionType
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WorkerId
from tensorforge.data import DataRedistributor, DataShard, DataTransfer, IntervalSet, partition
from tensorforge.errors import ConfigurationError, ConflictError, InvalidInputError

A, B, C = (WorkerId(name, "127.0.0.1", 1) for name in "abc")
INCREMENTAL = DataRedistributor(
    ElasticTrainingConfig(redistribution_type=RedistributionType.INCREMENTAL)
)
FULL = DataRedistributor(ElasticTrainingConfig())


def topologies(old, new):
    before = ClusterTopology(workers=old)
    return before, before.succeed(new)


def moves(plan):
    return [(t.source_worker, t.destination_worker, t.shard.size) for t in plan.transfers]


def test_a_newcomer_receives_the_ends_of_what_the_others_hold():
    plan = INCREMENTAL.calculate_plan(*topologies([A, B], [A, B, C]), 12)
    assert plan.ownership == {
        A: IntervalSet(((0, 4),)),
        B: IntervalSet(((6, 10),)),
        C: IntervalSet(((4, 6), (10, 12))),
    }
    assert moves(plan) == [(A, C, 2), (B, C, 2)]
    assert (plan.moved_samples, plan.minimum_moves, plan.total_shards) == (4, 4, 4)


def test_what_a_dead_worker_held_comes_from_the_origin():
    plan = INCREMENTAL.calculate_plan(*topologies([A, B], [A]), 10)
    assert moves(plan) == [(None, A, 5)]


def test_a_worker_that_leaves_still_serves():
    plan = INCREMENTAL.calculate_plan(*topologies([A, B], [A]), 10, departing=[B])
    assert moves(plan) == [(B, A, 5)]


def test_a_first_generation_takes_everything_from_the_origin():
    plan = FULL.calculate_plan(*topologies([], [A, B]), 5)
    assert moves(plan) == [(None, A, 3), (None, B, 2)]


def test_a_full_reshuffle_deals_contiguous_ranges_by_rank():
    plan = FULL.calculate_plan(*topologies([A, B], [A, B, C]), 12)
    assert [ranges.ranges for ranges in plan.ownership.values()] == [
        ((0, 4),),
        ((4, 8),),
        ((8, 12),),
    ]
    assert plan.moved_samples == 6 > plan.minimum_moves == 4


def test_an_empty_new_topology_is_an_error():
    for planner in (INCREMENTAL, FULL):
        with pytest.raises(InvalidInputError, match=r"generation 1\) has no workers"):
            planner.calculate_plan(*topologies([A], []), 10)


def test_what_was_consumed_neither_moves_nor_counts():
    consumed = IntervalSet(((0, 3), (5, 8)))
    plan = INCREMENTAL.calculate_plan(*topologies([A, B], [A]), 10, consumed=consumed)
    assert plan.ownership == {A: IntervalSet(((3, 5), (8, 10)))}
    assert plan.moved_samples == 2


def test_the_order_of_transfers_is_the_order_of_need():
    plan = FULL.calculate_plan(*topologies([], [A]), 10, consumed=IntervalSet(((4, 5),)))
    assert [(t.shard.start_index, t.priority) for t in plan.transfers] == [(0, 9), (5, 5)]


def test_times_come_from_the_measured_rate():
    plan = FULL.calculate_plan(*topologies([], [A, B]), 100, samples_per_second=25.0)
    assert [t.estimated_completion for t in plan.transfers] == [2.0, 2.0]
    assert FULL.calculate_plan(*topologies([], [A]), 5).transfers[0].estimated_completion is None
    with pytest.raises(InvalidInputError, match="samples_per_second"):
        FULL.calculate_plan(*topologies([], [A]), 5, samples_per_second=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"total_dataset_size": -1}, "total_dataset_size = -1"),
        ({"total_dataset_size": 1.5}, "total_dataset_size = 1.5"),
        ({"consumed": IntervalSet(((5, 11),))}, "reaches beyond the 10 samples"),
        (
            {"ownership": {A: IntervalSet(((0, 5),)), B: IntervalSet(((4, 6),))}},
            r"\[4, 5\) has two holders",
        ),
    ],
)
def test_a_wrong_question_gets_a_clear_answer(arguments, message):
    old, new = topologies([A, B], [A])
    with pytest.raises(InvalidInputError, match=message):
        INCREMENTAL.calculate_plan(old, new, **{"total_dataset_size": 10, **arguments})


def test_shards_that_are_no_partition_are_refused():
    with pytest.raises(InvalidInputError, match="at least 1"):
        FULL.calculate_shard_plan(*topologies([], [A]), [])
    with pytest.raises(InvalidInputError, match="does not start at 5"):
        FULL.calculate_shard_plan(*topologies([], [A]), [DataShard(0, 0, 5), DataShard(1, 6, 9)])


def test_whole_shards_move_when_the_unit_is_a_shard():
    plan = INCREMENTAL.calculate_shard_plan(*topologies([A, B], [A, B, C]), partition(120, 12))
    assert {worker: len(shards) for worker, shards in plan.worker_assignments.items()} == {
        A: 4,
        B: 4,
        C: 4,
    }
    assert (plan.moved_units, plan.minimum_moves, plan.moved_samples) == (4, 4, 40)
    assert "4 shards moved, minimum 4" in str(plan)


@pytest.mark.parametrize("size", [10**4, 10**12])
def test_a_plan_has_a_few_ranges_per_worker_whatever_the_number_of_samples(size):
    workers = [WorkerId(f"w{n}", "h", n) for n in range(40)]
    plan = INCREMENTAL.calculate_plan(*topologies(workers[:32], workers), size)
    assert len(plan.transfers) <= 32 + 40


def test_a_wrong_plan_is_refused_with_the_reasons():
    old, new = topologies([A, B], [A, B, C])
    plan = FULL.calculate_plan(old, new, 12)
    assert FULL.validate_redistribution(new, plan)
    found = FULL.validate_redistribution(new.remove_worker(C), plan)
    assert not found
    with pytest.raises(ConflictError, match=r"wrong_generation.*c@127.0.0.1:1 is not a member"):
        found.require()


def test_a_single_shard_goes_through_the_mover():
    moved = []

    class Mover:
        def transfer(self, transfer, *, generation=None):
            moved.append((transfer, generation))

    config = ElasticTrainingConfig()
    DataRedistributor(config, Mover()).transfer_data_shards(A, B, DataShard(0, 0, 5), generation=3)
    expected = DataTransfer(source_worker=A, destination_worker=B, shard=DataShard(0, 0, 5))
    assert moved == [(expected, 3)]
    with pytest.raises(ConfigurationError, match="can only plan"):
        FULL.transfer_data_shards(A, B, DataShard(0, 0, 5))
