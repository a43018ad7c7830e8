"""Signal handlers that are there for a while and then are what they were."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any


class SignalHandlers:
    """Calls a function per signal, between `install` and `remove`. Only the main thread can install."""

    def __init__(self, actions: Mapping[signal.Signals, Callable[[], None]]) -> None:
        self._actions = actions
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Take over; does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in self._actions:
                self._previous[number] = signal.signal(number, self._handle)

    def remove(self) -> None:
        """Give the signals back to whoever had them."""
        if threading.current_thread() is threading.main_thread():
            while self._previous:
                number, handler = self._previous.popitem()
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._actions[signal.Signals(number)]()
