"""The local crew: workers are child processes of the launcher."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorforge.errors import UnavailableError
from tensorforge.launch.crew.crew import CrewEvent, Order, Placed, Unplaceable
from tensorforge.launch.processes.children import Children


class LocalCrew:
    """Starts every worker at once, on the machine of the launcher. Nothing vanishes, nothing waits.

    The thread that starts a worker must live as long as the worker does (see `Children`).
    """

    def __init__(self, python: str = sys.executable) -> None:
        self._python = python
        self._children = Children()
        self._events: list[CrewEvent] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The running processes."""
        return self._children.names

    @property
    def wake_fd(self) -> int:
        """A descriptor for `signal.set_wakeup_fd`: a byte written to it makes `poll` return."""
        return self._children.wake_fd

    def wake(self) -> None:
        """Make `poll` return early; may be called from any thread."""
        self._children.wake()

    def start(self, name: str, order: Order) -> None:
        """Start a worker now; `Placed` or `Unplaceable` is among the next events."""
        command = [self._python, "-m", "tensorforge.launch.processes.bootstrap", *order.words]
        environment = {**os.environ, **order.variables}
        try:
            pid = self._children.start(name, command, environment, order.folder, spare=order.spare)
        except UnavailableError as error:
            self._events.append(Unplaceable(name, str(error)))
            return
        if not order.spare:
            self._events.append(Placed(name, pid))

    def its_turn(self, name: str, variables: Mapping[str, str]) -> None:
        """Let a spare run its script with these variables in addition."""
        self._events.append(Placed(name, self._children.activate(name, variables)))

    def signal(self, name: str, number: int) -> None:
        """Send a signal to the worker's process."""
        self._children.signal(name, number)
        if number == signal.SIGTERM:
            self._children.signal(name, signal.SIGCONT)  # a stopped process handles no SIGTERM

    def kill(self, name: str) -> None:
        """Kill the worker with its process group."""
        self._children.kill(name)

    def abandon(self, name: str) -> None:
        """Kill the worker if it still runs."""
        if name in self.names:
            self.kill(name)

    def start_here(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start another process; return its pid."""
        return self._children.start(name, command, environment, Path.cwd())

    def poll(self, timeout: float | None) -> list[CrewEvent]:
        """Wait at most `timeout` seconds for events and return them in order."""
        events, self._events = self._events, []
        return [*events, *self._children.poll(0.0 if events else timeout)]

    def close(self) -> None:
        """Kill the processes that still run. May be called twice."""
        self._children.close()
