"""A clock that only the test advances."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class ManualClock:
    """Monotonic seconds and the corresponding UTC time; `advance` and `sleep` advance both."""

    def __init__(self, start: float = 0.0, at: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._now = start
        self._origin = at - timedelta(seconds=start)

    def __call__(self) -> float:
        """The current seconds; replaces `time.monotonic`."""
        return self._now

    @property
    def utc(self) -> datetime:
        """The current UTC time."""
        return self._origin + timedelta(seconds=self._now)

    def advance(self, seconds: float) -> float:
        """Advance by `seconds` and return the new time."""
        if seconds < 0:
            raise ValueError(f"seconds = {seconds}: time does not run backwards")
        self._now += seconds
        return self._now

    def sleep(self, seconds: float) -> None:
        """Advance by `seconds`; replaces `time.sleep`."""
        self.advance(seconds)
