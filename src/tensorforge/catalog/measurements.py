"""Measured durations of saves and restores, and failures of runs: the input of restore plans and schedules."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tensorforge.catalog.chains.restore import RestoreMeasurement, RestoreRates, rates_from
from tensorforge.catalog.chains.schedule import TrainingProgress
from tensorforge.catalog.schema import MEASUREMENTS, to_microseconds
from tensorforge.errors import InvalidInputError
from tensorforge.storage.database import Database

RECENT = 50
"""How many of the latest measurements are used."""


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The measurements of a run: the duration of a save, the failures, and how long the run was observed."""

    save_seconds: float | None
    failures: int
    observed_seconds: float

    def progress(self, step: int, now: float, last_step: int, last_time: float) -> TrainingProgress:
        """The history and the position of training, as input of `CheckpointSchedule`."""
        return TrainingProgress(
            step,
            now,
            last_step,
            last_time,
            self.save_seconds,
            self.failures,
            self.observed_seconds,
        )


class Measurements:
    """Writes measurements to the database of the catalog and summarises them."""

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

    def record_save(self, training_run_id: str, bytes_written: int, seconds: float) -> None:
        """Record that training stopped for `seconds` during a save."""
        self._insert(training_run_id, "save", 1, bytes_written, seconds)

    def record_restore(
        self, training_run_id: str, links: int, bytes_read: int, seconds: float
    ) -> None:
        """Record the duration of a restore that read a chain of `links` checkpoints."""
        self._insert(training_run_id, "restore", links, bytes_read, seconds)

    def record_failure(self, training_run_id: str) -> None:
        """Record that a worker, or the run, failed."""
        self._insert(training_run_id, "failure", 0, 0, 0.0)

    def restore_rates(self, training_run_id: str) -> RestoreRates | None:
        """The speed of this run's latest restores; of all runs if this one has none; `None` if none has."""
        for run in (training_run_id, None):
            rows = self._latest("restore", run)
            rates = rates_from([RestoreMeasurement(r.links, r.bytes, r.seconds) for r in rows])
            if rates is not None:
                return rates
        return None

    def history(self, training_run_id: str) -> RunHistory:
        """The median duration of the latest saves, the failures, and the time since the first measurement."""
        saves = [row.seconds for row in self._latest("save", training_run_id)]
        of_run = MEASUREMENTS.c.training_run_id == training_run_id
        with self._database.read() as connection:
            failures = connection.scalar(
                sa.select(sa.func.count()).where(of_run, MEASUREMENTS.c.kind == "failure")
            )
            first = connection.scalar(sa.select(sa.func.min(MEASUREMENTS.c.at)).where(of_run))
        observed = 0.0 if first is None else (to_microseconds(self._clock()) - first) / 1e6
        return RunHistory(
            statistics.median(saves) if saves else None, failures or 0, max(0.0, observed)
        )

    def _insert(self, run: str, kind: str, links: int, size: int, seconds: float) -> None:
        if not (size >= 0 and seconds >= 0):
            raise InvalidInputError(f"bytes = {size}, seconds = {seconds}: must not be negative")
        with self._database.write() as connection:
            connection.execute(
                MEASUREMENTS.insert().values(
                    training_run_id=run,
                    kind=kind,
                    links=links,
                    bytes=size,
                    seconds=seconds,
                    at=to_microseconds(self._clock()),
                )
            )

    def _latest(self, kind: str, run: str | None) -> list[sa.Row[Any]]:
        query = sa.select(MEASUREMENTS).where(MEASUREMENTS.c.kind == kind)
        if run is not None:
            query = query.where(MEASUREMENTS.c.training_run_id == run)
        with self._database.read() as connection:
            latest = query.order_by(MEASUREMENTS.c.id.desc()).limit(RECENT)
            return list(connection.execute(latest))
