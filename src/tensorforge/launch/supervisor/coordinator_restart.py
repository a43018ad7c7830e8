"""When the coordinator is started again, and when that is given up."""

from __future__ import annotations

from tensorforge.launch.supervisor.restart_budget import backoff

QUICK_DEATH = 5.0
"""A coordinator that lived for less seconds than this did not come up."""
ATTEMPTS = 6


class CoordinatorCare:
    """Counts the deaths in a row of the one coordinator. It is known once it has served at all."""

    def __init__(self) -> None:
        self.is_known = False
        self.due: float | None = None
        self._serving_since: float | None = None
        self._deaths = 0

    def serves(self, now: float) -> bool:
        """It answers; whether for the first time."""
        first = not self.is_known
        self.is_known = True
        self._serving_since = now
        return first

    def died(self, now: float) -> bool:
        """It ended; whether it is worth another attempt, which is then due."""
        lived = 0.0 if self._serving_since is None else now - self._serving_since
        self._serving_since = None
        self._deaths = 1 if lived >= QUICK_DEATH else self._deaths + 1
        if self._deaths >= ATTEMPTS or not self.is_known:
            return False
        self.due = now + backoff(self._deaths, base=0.2)
        return True

    def is_due(self, now: float) -> bool:
        """Whether to start it now; said once."""
        if self.due is None or now < self.due:
            return False
        self.due = None
        return True
