from tensorforge.memory import BlockStatus, MemoryBlock
from tensorforge.memory.pool.defragmentation import Move, plan_room


def test_room_for_one_request_moves_the_fewest_bytes():
    blocks = [
        MemoryBlock("a", 10, 50, BlockStatus.ALLOCATED),  # a hole of 10 below it
        MemoryBlock("b", 70, 100, BlockStatus.PINNED),  # 10 below
        MemoryBlock("c", 180, 30, BlockStatus.CACHED),  # 10 below
        MemoryBlock("d", 220, 5, BlockStatus.ALLOCATED),  # 10 below
        MemoryBlock("e", 235, 765, BlockStatus.ALLOCATED),  # 10 below
    ]
    assert plan_room(blocks, 1000, 20, 1) == (Move("d", 220, 210, 5),)
    assert plan_room(blocks, 1000, 30, 1) == (Move("c", 180, 170, 30), Move("d", 220, 200, 5))
    assert plan_room(blocks, 1000, 31, 1) == ()
    assert plan_room(blocks, 1000, 10, 1) == ()
