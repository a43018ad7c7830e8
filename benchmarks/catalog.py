"""How the catalog's questions scale: 100,000 records in 1,000 runs, on SQLite.

The limit beside each figure is what the database itself takes for the rows in question (the same query without
the catalog around it); the aim is an absolute time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import sqlalchemy as sa

from tensorforge.catalog import (
    CheckpointManager,
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    GcPolicy,
    RestoreCriteria,
)
from tensorforge.catalog.identifiers import TimeSortedIds
from tensorforge.catalog.schema import CHECKPOINTS, SCHEMA, to_row
from tensorforge.storage.database import Database

START = datetime(2026, 1, 1, tzinfo=UTC)
CHAIN = 8
QUESTION_AIM_MS = 5.0
GC_AIM_S = 5.0


def records(runs: int, per_run: int):
    ids = TimeSortedIds()
    for run in range(runs):
        parent = None
        for step in range(per_run):
            at = START + timedelta(seconds=run + step * runs)
            alone = step % CHAIN == 0
            record = CheckpointRecord(
                checkpoint_id=ids.next(at),
                training_run_id=f"run-{run:05}",
                epoch=step // 10,
                step=step * 100,
                checkpoint_type=CheckpointType.FULL if alone else CheckpointType.INCREMENTAL,
                state=CheckpointState.COMPLETE,
                created_at=at,
                size_bytes=1 << 30,
                parent_id=None if alone else parent,
                metrics={"loss": 10.0 / (step + 1 + run % 7), "accuracy": step / per_run},
                storage_path=f"run-{run:05}/{step}",
                verified_at=at,
            )
            parent = record.checkpoint_id
            yield record


def fill(database: Database, runs: int, per_run: int) -> float:
    database.create(SCHEMA)
    started = time.perf_counter()
    rows = [to_row(record) for record in records(runs, per_run)]
    for start in range(0, len(rows), 5000):
        with database.write() as connection:
            connection.execute(CHECKPOINTS.insert(), rows[start : start + 5000])
    return time.perf_counter() - started


def median_ms(question: Callable[[str], object], names: list[str]) -> float:
    times = []
    for name in names:
        started = time.perf_counter()
        question(name)
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def raw_query(database: Database, run: str) -> object:
    query = sa.select(CHECKPOINTS).where(CHECKPOINTS.c.training_run_id == run)
    with database.read() as connection:
        return connection.execute(query).all()


def verdict(figure: float, aim: float) -> str:
    return "met" if figure < aim else "missed"


def ask(manager: CheckpointManager, database: Database, runs: int, repeats: int) -> None:
    names = [f"run-{(7919 * k) % runs:05}" for k in range(repeats)]
    limit = median_ms(lambda run: raw_query(database, run), names)
    print(f"{'the rows of one run, straight from the database (limit)':58} {limit:8.2f} ms")
    questions = {
        "get_latest": manager.get_latest,
        "list_for_run": manager.list_for_run,
        "find_restore_point": lambda run: manager.find_restore_point(
            RestoreCriteria(training_run_id=run)
        ),
        "find_restore_point, full ones preferred": lambda run: manager.find_restore_point(
            RestoreCriteria(training_run_id=run, prefer_full=True, max_step=5_000)
        ),
        "restore_plan": lambda run: manager.restore_plan(RestoreCriteria(training_run_id=run)),
    }
    for name, question in questions.items():
        figure = median_ms(question, names)
        aim = f"aim < {QUESTION_AIM_MS:g} ms: {verdict(figure, QUESTION_AIM_MS)}"
        print(f"{name:58} {figure:8.2f} ms  {figure / limit:5.2f} x limit  {aim}")


def collect(manager: CheckpointManager, database: Database) -> None:
    started = time.perf_counter()
    with database.read() as connection:
        rows = connection.execute(sa.select(CHECKPOINTS)).all()
    limit = time.perf_counter() - started
    now = START + timedelta(days=400)
    started = time.perf_counter()
    kept = sum(decision.keep for decision in manager.retention(now))
    dry = time.perf_counter() - started
    started = time.perf_counter()
    gone = manager.gc(now)
    figure = time.perf_counter() - started
    print(f"{f'reading all {len(rows)} rows (limit)':58} {limit:8.2f} s")
    print(f"{f'gc --dry-run, keeps {kept}':58} {dry:8.2f} s   {dry / limit:5.2f} x limit")
    aim = f"aim < {GC_AIM_S:g} s: {verdict(figure, GC_AIM_S)}"
    print(f"{f'gc, deletes {len(gone)}':58} {figure:8.2f} s   {figure / limit:5.2f} x limit  {aim}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="5,000 records in 50 runs")
    parser.add_argument("--database", help="a PostgreSQL URL instead of SQLite")
    options = parser.parse_args()
    runs, per_run, repeats = (50, 100, 20) if options.quick else (1000, 100, 200)
    with tempfile.TemporaryDirectory() as folder:
        url = options.database or f"sqlite:///{Path(folder) / 'catalog.db'}"
        with Database(url) as database:
            seconds = fill(database, runs, per_run)
            total = runs * per_run
            print(f"{total} records in {runs} runs, chains of {CHAIN}, {seconds:.1f} s to insert")
            policy = GcPolicy(max_checkpoints_per_run=20, keep_best_n=3)
            with CheckpointManager(policy, database=database) as manager:
                ask(manager, database, runs, repeats)
                collect(manager, database)


if __name__ == "__main__":
    main()
