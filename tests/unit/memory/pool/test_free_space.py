import random

import pytest

from tensorforge.errors import ConflictError, InvalidInputError
from tensorforge.memory.pool.free_space import FreeSpace


def test_free_space_refuses_overlap_and_emptiness():
    with pytest.raises(ConflictError, match="overlap at 5"):
        FreeSpace.around(100, [(0, 10), (5, 10)])
    with pytest.raises(InvalidInputError):
        FreeSpace(0)


def test_stale_entries_do_not_pile_up():
    rng = random.Random(5)
    space = FreeSpace(1 << 30)
    live = [(space.take(size), size) for size in rng.choices([8, 16, 24], k=500)]
    for _ in range(20_000):
        index, size = rng.randrange(len(live)), rng.choice([8, 16, 24])
        space.give(*live[index])
        live[index] = (space.take(size), size)
    heaps = space._bins.values()
    assert all(set(heap) & set(space._hole_at) for heap in heaps)
    assert sum(map(len, heaps)) <= 2 * len(space) + 17 * len(heaps)
