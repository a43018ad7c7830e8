"""The story of the rescales, and the stopwatch that dates its parts."""

from __future__ import annotations

from collections.abc import Iterable

from tensorforge.elastic.coordinator.journal_records import (
    HISTORY,
    Decided,
    RescaleRecord,
    WasCommitted,
    WasFormed,
    complete,
)
from tensorforge.elastic.protocol.messages import Progress


class RescaleLog:
    """One record per rescale, newest last. Each part of a rescale ends where the next one begins."""

    def __init__(self, history: Iterable[RescaleRecord], now: float) -> None:
        self.history = list(history)
        self._milestone = now

    def decided(self, entry: Decided, now: float) -> None:
        """A rescale begins."""
        self.history = [*self.history[-(HISTORY - 1) :], RescaleRecord.opened_by(entry)]
        self._milestone = now

    def announced(self, generation: int, now: float) -> None:
        """The decision is durable and on its way to the workers."""
        newest = self.history[-1] if self.history else None
        if newest is not None and newest.generation == generation and newest.decision_ms is None:
            newest.decision_ms = self._lap(now)

    def stopped(self, now: float) -> None:
        """Every member stands at the barrier."""
        self.history[-1].barrier_ms = self._lap(now)

    def formed(self, generation: int, moved: dict[str, int], now: float) -> WasFormed:
        """Every member has formed; returns what the journal should hold about it."""
        record = self.history[-1]
        entry = WasFormed(
            generation=generation,
            decision_ms=record.decision_ms or 0.0,
            barrier_ms=record.barrier_ms or 0.0,
            forming_ms=self._lap(now),
            moved=dict(moved),
        )
        complete(self.history, entry)
        return entry

    def committed(self, progress: Progress, now: float) -> WasCommitted:
        """The first step was committed; returns what the journal should hold about it."""
        entry = WasCommitted(
            generation=progress.generation,
            epoch=progress.epoch,
            step=progress.step,
            learning_rate=progress.learning_rate,
            samples=progress.samples,
            global_batch_size=progress.global_batch_size,
            first_commit_ms=self._lap(now),
        )
        complete(self.history, entry)
        return entry

    def _lap(self, now: float) -> float:
        milliseconds = max(0.0, (now - self._milestone) * 1000)
        self._milestone = now
        return milliseconds
