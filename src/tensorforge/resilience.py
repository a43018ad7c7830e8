"""Retries with back-off within limits, and counting replayed events once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from tensorforge.errors import ConfigurationError
from tensorforge.validation import whole_number

Result = TypeVar("Result")
Item = TypeVar("Item")

_jitter = random.Random()  # noqa: S311  spreads retries, guards nothing


def is_retryable(error: BaseException) -> bool:
    """Whether the error's class says that the same call may succeed later."""
    return bool(getattr(error, "retryable", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential back-off with full jitter, within a number of attempts and a deadline.

    Before retry *n* (the first one is 1) the wait is drawn evenly between 0 and
    `min(max_delay, base_delay * multiplier ** (n - 1))`, so that callers that failed together do not
    come back together. A call is repeated only if its error is `retryable`; the last error is raised
    unchanged. `deadline` limits the sum of all attempts and waits, in seconds.
    """

    max_attempts: int = 5
    base_delay: float = 0.05
    max_delay: float = 5.0
    multiplier: float = 2.0
    deadline: float | None = None

    def __post_init__(self) -> None:
        whole_number("max_attempts", self.max_attempts, least=1)
        if not self.base_delay >= 0:
            raise ConfigurationError("base_delay", self.base_delay, "must not be negative")
        if not self.max_delay >= self.base_delay:
            raise ConfigurationError("max_delay", self.max_delay, "must be at least base_delay")
        if not self.multiplier >= 1:
            raise ConfigurationError("multiplier", self.multiplier, "must be at least 1")
        if self.deadline is not None and not self.deadline > 0:
            raise ConfigurationError("deadline", self.deadline, "must be positive, or None")

    def next_delay(
        self, attempt: int, error: BaseException, elapsed: float, share: float
    ) -> float | None:
        """Seconds to wait after failed attempt number `attempt` (from 1), or `None` to give up.

        `elapsed` is the time since the first attempt began. `share`, from 0 to 1, is the part of the longest
        wait that is taken.
        """
        if attempt >= self.max_attempts or not is_retryable(error):
            return None
        delay = share * self._ceiling(attempt)
        if self.deadline is not None and elapsed + delay >= self.deadline:
            return None
        return delay

    def _ceiling(self, attempt: int) -> float:
        try:
            return min(self.max_delay, self.base_delay * self.multiplier ** (attempt - 1))
        except OverflowError:
            return self.max_delay

    def run(
        self,
        operation: Callable[[], Result],
        *,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        share: Callable[[], float] = _jitter.random,
    ) -> Result:
        """Call `operation` until it succeeds and return its result, or raise its last error."""
        started, attempt = clock(), 0
        while True:
            attempt += 1
            try:
                return operation()
            except Exception as error:
                delay = self.next_delay(attempt, error, clock() - started, share())
                if delay is None:
                    raise
            sleep(delay)


def deduplicate(
    items: Iterable[Item],
    key: Callable[[Item], Hashable],
    seen: set[Hashable] | None = None,
) -> Iterator[Item]:
    """Yield each item whose key has not occurred before, in order.

    The keys are added to `seen`. Pass the same set again to skip items that an earlier call has yielded.
    """
    known = set() if seen is None else seen
    for item in items:
        identity = key(item)
        if identity not in known:
            known.add(identity)
            yield item
