"""Exits with code 0 or 75 (unfinished) and the reasons for them, which arrive in any order."""

from __future__ import annotations

from collections.abc import Iterator

UNASKED = "ended before the training was complete"
EXPLANATION_TIMEOUT = 15.0
"""How many seconds the coordinator has to say why a worker ended without a failure."""
NOBODY_JOINED_TIMEOUT = 3.0
"""The same while no worker has joined yet: then no reason is likely to come."""


class ExitReasons:
    """Exits with code 0, split into explained and unexplained.

    A worker whose exit is not explained counts as running, so it is not replaced before the coordinator had
    time to say that the worker was let go. While the coordinator is away, that time does not run.
    """

    def __init__(self) -> None:
        self._unexplained: dict[str, float] = {}
        self._released: set[str] = set()
        self._left: set[str] = set()
        self._concluded: set[str] = set()
        self._can_be_asked = False

    def __len__(self) -> int:
        return len(self._unexplained)

    def coordinator_is(self, there: bool, now: float) -> None:
        """The coordinator started or ended; after a start, the time for unexplained exits begins again."""
        self._can_be_asked = there
        if there:
            self._unexplained = {
                name: max(limit, now + EXPLANATION_TIMEOUT)
                for name, limit in self._unexplained.items()
            }

    def exited(self, name: str, now: float, *, anybody_joined: bool) -> None:
        """The worker ended without a failure, and its reason is not known yet."""
        patience = EXPLANATION_TIMEOUT if anybody_joined else NOBODY_JOINED_TIMEOUT
        self._unexplained[name] = now + patience

    def concluded(self, name: str, outcome: str) -> None:
        """The worker's training code reported its end; `outcome` is complete, stopped or left."""
        self._concluded.add(name)
        if outcome == "left":
            self._left.add(name)

    def has_concluded(self, name: str) -> bool:
        """Whether the worker's training code reported its end."""
        return name in self._concluded

    def is_news(self, name: str) -> bool:
        """Whether the release of the worker was not reported before."""
        return name not in self._released

    def release(self, name: str) -> bool:
        """The coordinator let the worker go; returns whether its exit waited for this explanation."""
        self._released.add(name)
        return self._unexplained.pop(name, None) is not None

    def left_by_itself(self, name: str) -> bool:
        """Whether the worker itself reported that it left."""
        return name in self._left

    def overdue(self, now: float) -> list[str]:
        """The workers whose exits were not explained in time; each is returned once."""
        if not self._can_be_asked:
            return []
        late = [name for name, limit in self._unexplained.items() if now >= limit]
        for name in late:
            del self._unexplained[name]
        return late

    def deadlines(self) -> Iterator[float]:
        """The moments at which `overdue` may return a worker."""
        if self._can_be_asked:
            yield from self._unexplained.values()

    def clear(self) -> None:
        """Forget the unexplained exits: the run is ending."""
        self._unexplained.clear()
