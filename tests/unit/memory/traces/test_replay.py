import pytest
from tests.unit.memory.traces.making import trace_of

from tensorforge.errors import NotFoundError
from tensorforge.memory import replay_trace
from tensorforge.memory.pool.placement_policies import online_policy


def test_an_unknown_policy_is_named_with_those_there_are():
    with pytest.raises(
        NotFoundError, match="best-fit, two-ended, first-fit, tlsf, pytorch-like, offline"
    ):
        online_policy("magic")


def test_best_fit_reuses_the_hole_and_pytorchs_rules_round_to_segments():
    trace = trace_of((0, 3 << 20), (0, -(3 << 20)), (1, 2 << 20), (2, 100))
    assert replay_trace(trace, "best-fit").peak_reserved == 3 << 20
    assert replay_trace(trace, "pytorch-like").peak_reserved == (20 << 20) + (2 << 20)


def test_offline_placement_avoids_a_hole_that_best_fit_makes():
    # The small block outlives the large one it follows, and stands in the way of a larger one.
    trace = trace_of((0, 4096), (1, 512), (0, -4096), (2, 8192), (1, -512), (2, -8192))
    assert replay_trace(trace, "best-fit").peak_reserved == 4096 + 512 + 8192
    assert replay_trace(trace, "offline").peak_reserved == 8704


def test_small_blocks_at_the_far_end_are_shown_at_the_end_of_the_pool():
    result = replay_trace(trace_of((0, 100), (1, 1 << 20)), "two-ended")
    assert result.position(1) == 0
    assert result.position(0) == result.peak_reserved - 512
