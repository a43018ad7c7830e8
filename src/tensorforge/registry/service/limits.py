"""How many requests a caller may send, and how large they may be."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from tensorforge.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of the service: `rate` requests per second and caller on average, `burst` at once."""

    rate: float = 2_000.0
    burst: int = 4_000
    body_bytes: int = 2_000_000
    header_bytes: int = 16_000
    url_bytes: int = 8_000

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigurationError("rate", self.rate, "must be positive")
        if not self.burst >= 1:
            raise ConfigurationError("burst", self.burst, "must be at least 1")
        if not self.body_bytes >= 1:
            raise ConfigurationError("body_bytes", self.body_bytes, "must be at least 1")


class RateLimiter:
    """One token bucket per caller, which has at most `burst` tokens and gains `rate` per second.

    Only the buckets of the last `capacity` callers are kept. A caller whose bucket was dropped starts with a
    full one.
    """

    def __init__(self, rate: float, burst: int, *, capacity: int = 10_000) -> None:
        self._rate = rate
        self._burst = float(burst)
        self._capacity = capacity
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_for(self, caller: str, now: float) -> float:
        """Take a token from the caller's bucket; returns 0.0, or the seconds until there is one."""
        with self._lock:
            level, since = self._buckets.pop(caller, (self._burst, now))
            level = min(self._burst, level + max(0.0, now - since) * self._rate)
            allowed = level >= 1
            self._buckets[caller] = (level - 1 if allowed else level, now)
            while len(self._buckets) > self._capacity:
                self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - level) / self._rate


class FailedTokens:
    """Addresses that sent tokens that are not valid, and how long each of them has to wait.

    The first `free` failures of an address cost nothing. From then on each failure doubles the time for which
    the address is refused, up to a minute. A valid token forgives the failures.
    """

    def __init__(self, *, free: int = 20, capacity: int = 10_000) -> None:
        self._free = free
        self._capacity = capacity
        self._lock = threading.Lock()
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def wait_for(self, address: str, now: float) -> float:
        """The seconds for which tokens of the address are not even looked up; 0.0 if they are."""
        with self._lock:
            _, until = self._failures.get(address, (0, 0.0))
        return max(0.0, until - now)

    def failed(self, address: str, now: float) -> None:
        """Count a token that was not valid."""
        with self._lock:
            count = self._failures.pop(address, (0, 0.0))[0] + 1
            over = count - self._free
            pause = 0.0 if over <= 0 else min(_LONGEST_PAUSE, 2.0 ** min(over - 1, 10))
            self._failures[address] = (count, now + pause)
            while len(self._failures) > self._capacity:
                self._failures.popitem(last=False)

    def succeeded(self, address: str) -> None:
        """Forget the failures of an address."""
        with self._lock:
            self._failures.pop(address, None)


_LONGEST_PAUSE = 60.0
