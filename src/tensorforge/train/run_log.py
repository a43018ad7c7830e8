"""The run log: what a worker did, as JSON lines in the run's folder, for the display and for later checks."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.data.plan.ledger import Ledger
from tensorforge.environment import RUN_DIR

log = logging.getLogger(__name__)


class RunLog:
    """Appends one line per event to `<folder>/<worker>.jsonl`; without a folder it does nothing."""

    def __init__(self, folder: Path | None, worker: str) -> None:
        self._worker = worker
        self._folder = folder
        self._file: TextIO | None = None
        self._has_warned = False
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"{worker}.jsonl").open("a", buffering=1, encoding="utf-8")

    @classmethod
    def from_environment(cls, worker: str) -> RunLog:
        """The log in the folder that the launcher named."""
        folder = RUN_DIR.read()
        return cls(None if folder is None else folder / "workers", worker)

    def write(self, kind: str, **facts: Any) -> None:
        """Append an event with the time and the worker's name."""
        if self._file is not None:
            line = {"kind": kind, "time": time.time(), "worker": self._worker, **facts}
            with self._warn_on_failure():
                self._file.write(json.dumps(line) + "\n")

    @contextmanager
    def _warn_on_failure(self) -> Iterator[None]:
        """Log a warning, once, if the disk is full or fails. Training goes on without the lines."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("the run log cannot be written: %s; training goes on", error)

    def commit(self, rank: int, workers: int, step: CommittedStep) -> None:
        """Append a committed step; rank 0 also appends it to the run's `metrics.jsonl`."""
        facts = step.to_json()
        self.write("commit", workers=workers, **facts)
        if rank == 0 and self._folder is not None:
            line = {"time": time.time(), "world_size": workers, **facts}
            path = self._folder.parent / "metrics.jsonl"
            with self._warn_on_failure(), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def ledger(self, ledger: Ledger) -> None:
        """What was consumed and what remains of the current epoch, in the run's `ledger.json`."""
        if self._folder is None:
            return
        content = {
            "epoch": ledger.epoch,
            "committed_step": ledger.committed_step,
            "size": ledger.size,
            "shards": ledger.shards,
            "consumed": [list(span) for span in ledger.consumed.ranges],
            "remaining": [list(span) for span in ledger.remaining.ranges],
            "packed": ledger.pack().hex(),
        }
        path = self._folder.parent / "ledger.json"
        temporary = path.with_suffix(f".{os.getpid()}")
        with self._warn_on_failure():
            temporary.write_text(json.dumps(content), encoding="utf-8")
            temporary.replace(path)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            with self._warn_on_failure():
                file.close()


def read_run_logs(folder: Path) -> list[dict[str, Any]]:
    """All workers' events in order of time; a last line that a killed worker left unfinished is skipped."""
    events = []
    for path in sorted((folder / "workers").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
    return sorted(events, key=lambda event: event["time"])
