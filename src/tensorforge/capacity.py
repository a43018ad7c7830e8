"""Capacity: does a request fit, how full is a queue, how fast does something grow?

The caller passes in all numbers, the time included. A `RollingWindow` has no lock of its own; whoever owns it
uses it under its own lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tensorforge.errors import CapacityError, InvalidInputError


@dataclass(frozen=True, slots=True)
class CapacityDecision:
    """Whether a request fits, with the figures and the reason."""

    admitted: bool
    requested: int
    available: int
    reason: str

    def require(self) -> None:
        """Raise `CapacityError` unless the request was admitted."""
        if not self.admitted:
            raise CapacityError(self.reason, requested=self.requested, available=self.available)


def check_capacity(requested: int, in_use: int, capacity: int | None) -> CapacityDecision:
    """Decide whether `requested` more fits beside `in_use` within `capacity` (`None`: no limit)."""
    if requested < 0 or in_use < 0 or (capacity is not None and capacity < 0):
        raise InvalidInputError(
            f"requested = {requested}, in_use = {in_use}, capacity = {capacity}: "
            "none of them may be negative"
        )
    if capacity is None:
        return CapacityDecision(True, requested, requested, "no limit is set")
    available = max(0, capacity - in_use)
    if requested <= available:
        return CapacityDecision(True, requested, available, f"{requested} of {available} free")
    reason = f"{requested} requested, but only {available} of {capacity} are free"
    return CapacityDecision(False, requested, available, reason)


def queue_pressure(depth: float, limit: float) -> float:
    """How full a queue is, from 0.0 (empty) to 1.0 (full, or fuller than `limit`).

    A queue whose limit is 0 is always full.
    """
    if depth < 0 or limit < 0:
        raise InvalidInputError(f"depth = {depth}, limit = {limit}: neither may be negative")
    if limit == 0:
        return 1.0
    return min(1.0, depth / limit)


class RollingWindow:
    """The amounts recorded during the last `seconds`.

    Times may come slightly out of order; an amount counts while `now - seconds < time <= now`.
    """

    __slots__ = ("_entries", "_seconds")

    def __init__(self, seconds: float) -> None:
        if not seconds > 0:
            raise InvalidInputError(f"seconds = {seconds!r}: must be more than 0")
        self._seconds = seconds
        self._entries: deque[tuple[float, float]] = deque()

    def add(self, amount: float, now: float) -> None:
        """Record `amount` at `now`."""
        self._entries.append((now, amount))
        self._drop_old(now)

    def total(self, now: float) -> float:
        """The sum of the amounts inside the window that ends at `now`."""
        return sum(amount for _, amount in self._inside(now))

    def count(self, now: float) -> int:
        """How many amounts lie inside the window that ends at `now`."""
        return len(self._inside(now))

    def rate(self, now: float) -> float:
        """The total per second of the window."""
        return self.total(now) / self._seconds

    def _inside(self, now: float) -> list[tuple[float, float]]:
        start = now - self._seconds
        return [entry for entry in self._entries if start < entry[0] <= now]

    def _drop_old(self, now: float) -> None:
        while self._entries and self._entries[0][0] <= now - self._seconds:
            self._entries.popleft()
