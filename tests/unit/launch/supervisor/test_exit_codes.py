import signal

import pytest

from tensorforge.launch.supervisor.exit_codes import UserFailure, describe_exit, signal_of


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
