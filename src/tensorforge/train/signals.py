"""Signal handlers that are installed for a while; afterwards the previous ones are restored."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any


class SignalHandlers:
    """Calls a function per signal, between `install` and `remove`."""

    def __init__(self, actions: Mapping[signal.Signals, Callable[[], None]]) -> None:
        self._actions = actions
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Install the handlers. Does nothing outside the main thread, where Python does not allow it."""
        if threading.current_thread() is threading.main_thread():
            for number in self._actions:
                self._previous[number] = signal.signal(number, self._handle)

    def remove(self) -> None:
        """Restore the previous handlers."""
        if threading.current_thread() is threading.main_thread():
            while self._previous:
                number, handler = self._previous.popitem()
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._actions[signal.Signals(number)]()
