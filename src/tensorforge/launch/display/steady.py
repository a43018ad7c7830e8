"""A display that outlives its terminal."""

from __future__ import annotations

from collections.abc import Callable

from tensorforge.launch.display.displays import Display
from tensorforge.launch.display.run_view import RunView
from tensorforge.launch.supervisor.events import Event
from tensorforge.launch.supervisor.instructions import Say


class SteadyDisplay:
    """Shows what the other one shows, until nobody can see it any more; then it stays silent.

    A terminal that was closed is no reason to stop training: whoever closed it has sent SIGHUP, or has
    taken care that it does not arrive. `is_pipe_broken`: the reader of a pipe went away, as `head` does.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        self._is_silent = False
        self.is_pipe_broken = False

    def printed(self, worker: str, line: str) -> None:
        """A line of a worker's output."""
        self._attempt(lambda: self._display.printed(worker, line))

    def say(self, notice: Say) -> None:
        """A notice of the supervisor."""
        self._attempt(lambda: self._display.say(notice))

    def event(self, event: Event, view: RunView, now: float) -> None:
        """Something happened."""
        self._attempt(lambda: self._display.event(event, view, now))

    def refresh(self, view: RunView, now: float) -> None:
        """Time has passed."""
        self._attempt(lambda: self._display.refresh(view, now))

    def close(self) -> None:
        """The run is over."""
        self._attempt(self._display.close)

    def _attempt(self, show: Callable[[], None]) -> None:
        if self._is_silent:
            return
        try:
            show()
        except OSError as error:
            self._is_silent = True
            self.is_pipe_broken = isinstance(error, BrokenPipeError)
