"""The records of the rescales, and how long their phases took."""

from __future__ import annotations

from collections.abc import Iterable

from tensorforge.elastic.coordinator.journal_records import (
    Decided,
    WasCommitted,
    WasFormed,
    complete,
    with_decision,
)
from tensorforge.elastic.protocol.messages import Progress
from tensorforge.elastic.protocol.rescale_record import RescaleRecord


class RescaleLog:
    """One record per rescale, newest last. Each method is called at the moment when a phase ends."""

    def __init__(self, history: Iterable[RescaleRecord], now: float) -> None:
        self.history = list(history)
        self._phase_began = now

    def decided(self, entry: Decided, now: float) -> None:
        """A generation was decided: a rescale begins."""
        self.history = with_decision(self.history, entry)
        self._phase_began = now

    def announced(self, generation: int, now: float) -> None:
        """The decision is in the journal and was sent to the workers."""
        newest = self.history[-1] if self.history else None
        if newest is not None and newest.generation == generation and newest.decision_ms is None:
            newest.decision_ms = self._end_phase(now)

    def stopped(self, now: float) -> None:
        """Every member has stopped."""
        self.history[-1].barrier_ms = self._end_phase(now)

    def formed(self, generation: int, moved: dict[str, int], now: float) -> WasFormed:
        """Every member has formed the new group; returns the entry for the journal."""
        record = self.history[-1]
        entry = WasFormed(
            generation=generation,
            decision_ms=record.decision_ms or 0.0,
            barrier_ms=record.barrier_ms or 0.0,
            forming_ms=self._end_phase(now),
            moved=dict(moved),
        )
        complete(self.history, entry)
        return entry

    def committed(self, progress: Progress, now: float) -> WasCommitted:
        """The first step was committed; returns the entry for the journal."""
        entry = WasCommitted(
            generation=progress.generation,
            epoch=progress.epoch,
            step=progress.step,
            learning_rate=progress.learning_rate,
            samples=progress.samples,
            global_batch_size=progress.global_batch_size,
            first_commit_ms=self._end_phase(now),
        )
        complete(self.history, entry)
        return entry

    def _end_phase(self, now: float) -> float:
        milliseconds = max(0.0, (now - self._phase_began) * 1000)
        self._phase_began = now
        return milliseconds
