"""Allocations for the tests of pools."""

from tensorforge.memory import AllocationRequest


def take(pool, size, *, now=0.0, **options):
    result = pool.allocate(AllocationRequest("t", size, **options), now)
    assert result.success, result.error
    return result.block_id
