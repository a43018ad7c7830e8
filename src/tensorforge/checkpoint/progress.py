"""Counting bytes."""

from __future__ import annotations

import threading

from tensorforge.checkpoint.options import Progress


class Meter:
    """Counts bytes and tells a callback, one call at a time."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._lock = threading.Lock()
        self._total = total
        self._progress = progress
        self._done = 0

    def add(self, count: int) -> None:
        """Count `count` more bytes."""
        with self._lock:
            self._done = min(self._total, self._done + count)
            if self._progress is not None:
                self._progress(self._done, self._total)
