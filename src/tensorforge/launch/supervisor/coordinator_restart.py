"""When a coordinator that exited is started again. Training does not need it, so there is no last attempt."""

from __future__ import annotations

from tensorforge.launch.supervisor.restart_budget import backoff

QUICK_EXIT = 5.0
"""A coordinator that served for fewer seconds than this counts as one that did not come up."""
LONGEST_PAUSE = 60.0
"""The pause before the next start doubles with each quick exit, up to this many seconds."""


class CoordinatorRestart:
    """Counts how often in a row the coordinator exited soon after its start.

    `has_served`: the coordinator has served at least once in this launch. `restart_at`: when to start it
    again; `None` while no restart is planned.
    """

    def __init__(self) -> None:
        self.has_served = False
        self.restart_at: float | None = None
        self._serving_since: float | None = None
        self._quick_exits = 0

    def serving(self, now: float) -> bool:
        """The coordinator serves; return whether this is the first time."""
        first = not self.has_served
        self.has_served = True
        self._serving_since = now
        return first

    def exited(self, now: float) -> float | None:
        """The coordinator exited; plan a restart and return the pause before it.

        `None`: the coordinator has never served in this launch, so nobody trains and nothing is restarted.
        """
        served = 0.0 if self._serving_since is None else now - self._serving_since
        self._serving_since = None
        self._quick_exits = 1 if served >= QUICK_EXIT else self._quick_exits + 1
        if not self.has_served:
            return None
        pause = backoff(self._quick_exits, base=0.2, most=LONGEST_PAUSE)
        self.restart_at = now + pause
        return pause

    def take_due(self, now: float) -> bool:
        """Return whether to start the coordinator now, and forget the planned restart if so."""
        if self.restart_at is None or now < self.restart_at:
            return False
        self.restart_at = None
        return True
