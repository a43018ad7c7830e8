"""A clock that moves only when a test says so."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class ManualClock:
    """Monotonic seconds and the matching UTC time; `advance` and `sleep` move both."""

    def __init__(self, start: float = 0.0, at: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._now = start
        self._origin = at - timedelta(seconds=start)

    def __call__(self) -> float:
        """Stand in for `time.monotonic`."""
        return self._now

    @property
    def utc(self) -> datetime:
        """The current time as people read it."""
        return self._origin + timedelta(seconds=self._now)

    def advance(self, seconds: float) -> float:
        """Let `seconds` pass and return the new time."""
        if seconds < 0:
            raise ValueError(f"seconds = {seconds}: time does not run backwards")
        self._now += seconds
        return self._now

    def sleep(self, seconds: float) -> None:
        """Stand in for `time.sleep`."""
        self.advance(seconds)
