"""How often a failed worker is replaced, and after how long."""

from __future__ import annotations

from tensorforge.capacity import RollingWindow
from tensorforge.errors import ConfigurationError
from tensorforge.validation import whole_number


class RestartBudget:
    """At most `limit` restarts within any `window` seconds; 0 allows none."""

    def __init__(self, limit: int, window: float) -> None:
        whole_number("max_restarts", limit, least=0)
        if not window > 0:
            raise ConfigurationError("restart_window", window, "must be more than 0 seconds")
        self.limit = limit
        self.window = window
        self._spent = RollingWindow(window)

    def left(self, now: float) -> int:
        """How many restarts are left."""
        return max(0, self.limit - self._spent.count(now))

    def spend(self, now: float) -> bool:
        """Take one restart; `False` if none is left."""
        if not self.left(now):
            return False
        self._spent.add(1, now)
        return True


def backoff(failures: int, *, base: float = 0.5, most: float = 10.0) -> float:
    """Seconds to wait before the next start, after this many failures in a row without a committed step.

    The first replacement starts at once; the wait doubles with each further failure.
    """
    if failures <= 1:
        return 0.0
    return float(min(most, base * 2 ** min(failures - 2, 16)))
