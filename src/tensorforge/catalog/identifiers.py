"""Checkpoint ids that sort by time: 48 bits of milliseconds, then 80 random bits, as 26 characters."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from tensorforge.errors import InvalidInputError

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # without i, l, o, u, which are easily misread
_RANDOM_BITS = 80
_LENGTH = 26
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class TimeSortedIds:
    """Makes ids, each greater than the one before, even within one millisecond. Threads may share it.

    Ids of different processes sort by their millisecond.
    """

    def __init__(self, random_bits: Callable[[int], int] = secrets.randbits) -> None:
        self._random_bits = random_bits
        self._last = -1
        self._lock = threading.Lock()

    def next(self, now: datetime) -> str:
        """A new id for the time `now`. If the clock was set back, the id still sorts after the last one."""
        milliseconds = (now - _EPOCH) // timedelta(milliseconds=1)
        if not 0 <= milliseconds < 1 << 48:
            raise InvalidInputError(f"now = {now}: must not be before 1970")
        fresh = milliseconds << _RANDOM_BITS | self._random_bits(_RANDOM_BITS)
        with self._lock:
            same_millisecond = self._last >> _RANDOM_BITS >= milliseconds
            self._last = self._last + 1 if same_millisecond else fresh
            return _encode(self._last)


def _encode(value: int) -> str:
    return "".join(_ALPHABET[value >> shift & 31] for shift in range(5 * (_LENGTH - 1), -1, -5))
