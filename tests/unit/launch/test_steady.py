"""A display outlives its terminal."""

from __future__ import annotations

import errno

import pytest

from tensorforge.launch.display.displays import PlainDisplay
from tensorforge.launch.display.steady import SteadyDisplay
from tensorforge.launch.supervisor.instructions import Say


class Gone:
    """A stream whose other end went away."""

    def __init__(self, error):
        self.error = error
        self.tried = 0

    def write(self, _text):
        self.tried += 1
        raise self.error

    def flush(self):
        pass


@pytest.mark.parametrize(
    ("error", "is_pipe"), [(OSError(errno.EIO, "gone"), False), (BrokenPipeError(), True)]
)
def test_after_the_first_failure_there_is_silence(error, is_pipe):
    stream = Gone(error)
    display = SteadyDisplay(PlainDisplay(stream))
    display.say(Say("hello"))
    display.printed("worker-0", "hello")
    display.close()
    assert stream.tried == 1
    assert display.is_pipe_broken is is_pipe
