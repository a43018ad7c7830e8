import math

import pytest
from tests.unit.memory.traces.making import trace_of

from tensorforge.errors import InvalidInputError
from tensorforge.memory import AllocationTrace, replay_trace
from tensorforge.memory.traces.pool_advice import (
    advise_pool,
    fragmentation_sources,
    growth_per_second,
)


def test_a_leak_is_found_and_an_end_predicted():
    rows = []
    for step in range(40):
        rows += [(3 * step, 8192, "work"), (3 * step + 1, 1024, "kept for ever"), (3 * step, -8192)]
    trace = trace_of(*rows)
    assert growth_per_second(trace) == pytest.approx(1024 / 0.003, rel=0.1)
    advice = advise_pool(trace, capacity=1 << 20)
    assert 1.0 < advice.oom_seconds < 4.0
    steady = trace_of(*[row for n in range(40) for row in ((n, 8192), (n, -8192))])
    assert growth_per_second(steady) == 0.0
    assert advise_pool(steady).oom_seconds == math.inf


def test_the_block_below_a_hole_is_named_as_its_source():
    trace = trace_of(
        (0, 4096, "big"), (1, 512, "keeper"), (2, 4096, "big"), (3, 512, "keeper"), (0, -4096),
        (2, -4096), (4, 8192, "huge"),
    )  # fmt: skip
    result = replay_trace(trace, "best-fit")
    culprits = fragmentation_sources(trace, result, len(trace) - 1)
    assert [(c.label, c.blocks, c.hole_bytes) for c in culprits] == [("keeper", 1, 4096)]


def test_a_pool_that_is_too_small_is_told_where_it_fails():
    advice = advise_pool(trace_of((0, 4096, "a"), (1, 4096, "b")), capacity=6000)
    assert not advice.fits
    assert "out of memory for 'b'" in advice.first_failure
    assert advice.pressure[2] == 1.0


def test_advice_on_nothing_is_refused():
    with pytest.raises(InvalidInputError, match="empty"):
        advise_pool(AllocationTrace([]))
    with pytest.raises(InvalidInputError, match="capacity"):
        advise_pool(trace_of((0, 1)), capacity=0)
