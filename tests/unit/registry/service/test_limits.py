import pytest

from tensorforge.errors import ConfigurationError
from tensorforge.registry.service.limits import Limits, RateLimiter


def test_a_burst_is_allowed_then_the_rate_holds():
    limiter = RateLimiter(rate=2.0, burst=3)
    assert [limiter.wait_for("a", 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert limiter.wait_for("a", 0.0) == 0.5
    assert limiter.wait_for("a", 0.25) == 0.25
    assert limiter.wait_for("a", 0.5) == 0.0
    assert limiter.wait_for("a", 0.5) > 0


def test_callers_do_not_pay_for_each_other():
    limiter = RateLimiter(rate=1.0, burst=1)
    assert limiter.wait_for("a", 0.0) == 0.0
    assert limiter.wait_for("a", 0.0) > 0
    assert limiter.wait_for("b", 0.0) == 0.0


def test_a_pause_never_saves_up_more_than_a_burst():
    limiter = RateLimiter(rate=1.0, burst=2)
    limiter.wait_for("a", 0.0)
    assert [limiter.wait_for("a", 1e9) for _ in range(3)] == [0.0, 0.0, 1.0]


def test_a_clock_that_runs_backwards_gives_nothing_away():
    limiter = RateLimiter(rate=1.0, burst=1)
    limiter.wait_for("a", 100.0)
    assert limiter.wait_for("a", 0.0) == 1.0


def test_only_so_many_callers_are_remembered():
    limiter = RateLimiter(rate=1.0, burst=1, capacity=2)
    for caller in "abc":
        limiter.wait_for(caller, 0.0)
    assert limiter.wait_for("a", 0.0) == 0.0
    assert limiter.wait_for("c", 0.0) > 0


@pytest.mark.parametrize("options", [{"rate": 0}, {"burst": 0}, {"body_bytes": 0}])
def test_limits_without_meaning_are_refused(options):
    with pytest.raises(ConfigurationError):
        Limits(**options)
