import os
import signal
import threading

import pytest

from tensorforge.catalog import EmergencySaves
from tensorforge.errors import ConflictError


def test_a_signal_is_remembered_until_the_state_is_whole():
    saved = []
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, EmergencySaves(lambda: saved.append(1)) as emergency:
        emergency.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert emergency.is_requested
        assert saved == []
        emergency.check()
    assert (ended.value.code, saved) == (143, [1])
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_exception_saves_and_goes_on():
    saved = []
    with pytest.raises(RuntimeError, match="diverged"), EmergencySaves(lambda: saved.append(1)):
        raise RuntimeError("diverged")
    assert saved == [1]


def test_an_exception_that_left_the_state_unfit_does_not_save():
    saved = []
    with (
        pytest.raises(RuntimeError),
        EmergencySaves(lambda: saved.append(1), when_raised=lambda _error: False),
    ):
        raise RuntimeError("in the middle of a step")
    assert saved == []


def test_a_save_that_fails_does_not_hide_the_reason(caplog):
    def fail():
        raise OSError("disk full")

    with pytest.raises(RuntimeError, match="diverged") as raised, EmergencySaves(fail):
        raise RuntimeError("diverged")
    assert raised.value.__notes__ == ["no emergency checkpoint was saved: disk full"]


def test_a_quiet_end_saves_nothing():
    with EmergencySaves(lambda: pytest.fail("nothing happened")):
        pass


def test_signals_arrive_in_the_main_thread_only():
    refused = []

    def enter():
        try:
            EmergencySaves(print).__enter__()
        except ConflictError as error:
            refused.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(refused) == 1
