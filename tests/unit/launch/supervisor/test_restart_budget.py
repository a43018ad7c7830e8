import pytest

from tensorforge.errors import ConfigurationError
from tensorforge.launch.supervisor.restart_budget import RestartBudget, backoff


def test_the_budget_refills_as_its_window_moves():
    budget = RestartBudget(2, 10.0)
    assert budget.spend(0.0)
    assert budget.spend(4.0)
    assert not budget.spend(9.9)
    assert budget.left(10.0) == 1
    assert budget.spend(10.0)
    assert not budget.spend(10.0)


def test_a_budget_of_nothing_allows_nothing():
    assert not RestartBudget(0, 1.0).spend(0.0)


@pytest.mark.parametrize(("limit", "window"), [(-1, 1.0), (1, 0.0), (True, 1.0)])
def test_a_wrong_budget_is_refused(limit, window):
    with pytest.raises(ConfigurationError):
        RestartBudget(limit, window)


def test_the_first_replacement_is_immediate_and_a_crash_loop_slows_down():
    waits = [backoff(n) for n in range(9)]
    assert waits[:5] == [0.0, 0.0, 0.5, 1.0, 2.0]
    assert waits == sorted(waits)
    assert backoff(10_000) == 10.0
