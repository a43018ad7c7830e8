"""Times as the database stores them: microseconds since 1970 in UTC, as integers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tensorforge.errors import InvalidInputError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def to_micros(moment: datetime) -> int:
    """A time in microseconds, without rounding; `InvalidInputError` if it has no time zone."""
    if moment.tzinfo is None:
        raise InvalidInputError(f"{moment.isoformat()} has no time zone; use UTC")
    return (moment - _EPOCH) // _MICROSECOND


def from_micros(micros: int) -> datetime:
    """The time that `to_micros` was given, in UTC."""
    return _EPOCH + micros * _MICROSECOND
