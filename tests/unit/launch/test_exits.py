import signal

import pytest

from tensorforge.errors import ConfigurationError
from tensorforge.launch.supervisor.exit_codes import UserFailure, describe_exit, signal_of
from tensorforge.launch.supervisor.restart_budget import RestartBudget, backoff
from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "was killed by SIGKILL (by someone, or by the kernel because memory ran out)"),
        (137, "was killed by SIGKILL (by someone, or by the kernel because memory ran out)"),
        (-11, "was killed by SIGSEGV (it crashed in native code)"),
        (-15, "was killed by SIGTERM"),
        (-99, "was killed by signal 99"),
        (255, "exited with code 255"),
    ],
)
def test_an_exit_code_is_read_in_words(code, words):
    assert describe_exit(code) == words


def test_a_shell_names_signals_by_adding_128():
    assert signal_of(130) is signal.SIGINT
    assert signal_of(1) is None


def test_a_failure_is_told_in_one_line():
    failure = UserFailure(
        kind="ValueError", message="bad\nvery bad", where="t.py:3 in f", traceback=""
    )
    assert failure.summary == "raised ValueError: bad … (t.py:3 in f)"
    silent = UserFailure(kind="KeyError", message="", where="", traceback="")
    assert silent.summary == "raised KeyError"


def test_a_script_that_ends_itself_raised_nothing_worth_showing():
    ended = UserFailure(kind="SystemExit", message="2", where="t.py:3 in f", traceback="Traceback")
    assert ended.summary == "called sys.exit(2) (t.py:3 in f)"
    assert ended.traceback_shown == ""


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("workers", 0),
        ("workers", 1.5),
        ("min_workers", 0),
        ("min_workers", 5),
        ("max_workers", 2),
        ("standbys", -1),
        ("max_restarts", -1),
        ("hang_timeout", 0.0),
        ("stop_timeout", -1.0),
        ("restart_window", float("nan")),
    ],
)
def test_a_wrong_setting_is_named(field, value):
    settings = {"workers": 3, "min_workers": 2, field: value}
    with pytest.raises(ConfigurationError, match="must be"):
        SupervisionPolicy(**settings)


def test_the_number_of_workers_stays_within_its_limits():
    policy = SupervisionPolicy(workers=3, min_workers=2, max_workers=4)
    assert [policy.clamp(n) for n in (0, 2, 3, 9)] == [2, 2, 3, 4]
    assert SupervisionPolicy().clamp(1000) == 1000
