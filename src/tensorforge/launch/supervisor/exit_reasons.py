"""Who left in peace: exits and the reasons for them, which arrive in any order."""

from __future__ import annotations

from collections.abc import Iterator

UNASKED = "ended (code 0) before the training was complete"
EXPLANATION_TIMEOUT = 15.0
"""Seconds for the coordinator to tell why a worker ended with code 0."""
NOBODY_JOINED_TIMEOUT = 3.0
"""The same while it has not heard of anybody yet: then there is little to tell."""


class Departures:
    """Workers that ended with code 0, until it is known why; and those of whom it is known.

    An exit without a reason counts as a worker that is still there: it is not replaced before the
    coordinator had its time to tell that it was let go. A coordinator that is away has all the time it needs.
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
        """The coordinator came or went; one that came has its time from now on."""
        self._can_be_asked = there
        if there:
            self._unexplained = {
                name: max(limit, now + EXPLANATION_TIMEOUT)
                for name, limit in self._unexplained.items()
            }

    def exited(self, name: str, now: float, *, anybody_joined: bool) -> None:
        """The worker ended with code 0, and nobody has said why."""
        patience = EXPLANATION_TIMEOUT if anybody_joined else NOBODY_JOINED_TIMEOUT
        self._unexplained[name] = now + patience

    def concluded(self, name: str, outcome: str) -> None:
        """The worker's own last word."""
        self._concluded.add(name)
        if outcome == "left":
            self._left.add(name)

    def has_concluded(self, name: str) -> bool:
        """Whether its training code came to an end of its own."""
        return name in self._concluded

    def is_news(self, name: str) -> bool:
        """Whether its release was not told before."""
        return name not in self._released

    def release(self, name: str) -> bool:
        """The coordinator let it go; whether its exit was waiting for that explanation."""
        self._released.add(name)
        return self._unexplained.pop(name, None) is not None

    def left_by_itself(self, name: str) -> bool:
        """Whether it said that it left, even if nobody else does."""
        return name in self._left

    def overdue(self, now: float) -> list[str]:
        """The exits that nobody will explain any more; each is told once."""
        if not self._can_be_asked:
            return []
        late = [name for name, limit in self._unexplained.items() if now >= limit]
        for name in late:
            del self._unexplained[name]
        return late

    def deadlines(self) -> Iterator[float]:
        """When `overdue` may have something to tell."""
        if self._can_be_asked:
            yield from self._unexplained.values()

    def clear(self) -> None:
        """It does not matter any more."""
        self._unexplained.clear()
