"""Times as the database keeps them: whole microseconds since 1970, in UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tensorforge.errors import InvalidInputError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def to_micros(moment: datetime) -> int:
    """Exact; a time without a time zone is an `InvalidInputError`."""
    if moment.tzinfo is None:
        raise InvalidInputError(f"{moment.isoformat()} has no time zone; use UTC")
    return (moment - _EPOCH) // _MICROSECOND


def from_micros(micros: int) -> datetime:
    """The inverse of `to_micros`."""
    return _EPOCH + micros * _MICROSECOND
