"""Following the workers' run logs: `RUN_DIR/workers/<worker>.jsonl`, one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.encoding import Json
from tensorforge.launch.supervisor.events import (
    CheckpointProgress,
    Event,
    TrainingResumed,
    WorkerConcluded,
)

LINE_LIMIT = 1 << 20


class RunLogTail:
    """Reads the lines that were added since the last call; lines that are not JSON are skipped.

    An incomplete last line is kept until the rest of it is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, BinaryIO] = {}
        self._rests: dict[Path, bytes] = {}

    def read(self) -> list[Mapping[str, Json]]:
        """The new lines of all workers, file by file."""
        found: list[Mapping[str, Json]] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            found += self._read_file(path)
        return found

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _read_file(self, path: Path) -> Iterator[Mapping[str, Json]]:
        if path not in self._files:
            try:
                self._files[path] = path.open("rb")
            except OSError:
                return
        data = self._rests.get(path, b"") + self._files[path].read()
        *lines, rest = data.split(b"\n")
        self._rests[path] = rest if len(rest) <= LINE_LIMIT else b""
        for line in lines:
            yield from parse_line(line)


def parse_line(line: bytes) -> Iterator[Mapping[str, Json]]:
    """The object on the line, if it is one with a `kind`."""
    try:
        value = json.loads(line)
    except ValueError:
        return
    if isinstance(value, dict) and isinstance(value.get("kind"), str):
        yield value


class RunLogEvents:
    """Turns the workers' log lines into events; a step that several workers log becomes one event."""

    def __init__(self) -> None:
        self._step = -1
        self._generation = self._resumed_in = 0

    def events(self, lines: Iterable[Mapping[str, Json]]) -> Iterator[Event]:
        """The events of these lines, in order."""
        for line in lines:
            if line["kind"] == "formed":
                yield from self._formed(line)
            elif line["kind"] == "commit":
                yield from self._commit(line)
            elif line["kind"] == "checkpoint":
                yield from _checkpoint(line)
            elif line["kind"] == "final":
                yield WorkerConcluded(str(line.get("worker")), str(line.get("outcome")))

    def _formed(self, line: Mapping[str, Json]) -> Iterator[Event]:
        """A generation that forms at an earlier step has lost all workers and starts from a checkpoint."""
        step, generation = line.get("committed_step"), line.get("generation")
        if not isinstance(step, int) or not isinstance(generation, int):
            return
        if generation <= self._generation:
            return
        is_first, self._generation = self._generation == 0, generation
        if step < self._step or (is_first and step >= 0):
            before, self._step = None if is_first else self._step, step
            self._resumed_in = generation
            yield TrainingResumed(step, before)

    def _commit(self, line: Mapping[str, Json]) -> Iterator[Event]:
        committed = CommittedStep.from_json(line)
        if committed is None or 0 < committed.generation < self._resumed_in:
            return  # from before the resumption: this step is lost
        self._generation = max(self._generation, committed.generation)
        if committed.step > self._step:
            self._step = committed.step
            yield committed


def _checkpoint(line: Mapping[str, Json]) -> Iterator[Event]:
    step = line.get("step")
    if isinstance(step, int):
        yield CheckpointProgress(step, complete=bool(line.get("complete")))
