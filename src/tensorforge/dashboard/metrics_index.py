"""The committed steps of one run as columns, read from its `metrics.jsonl` as that file grows."""

from __future__ import annotations

import math
import operator
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

QUICK_BYTES = 2 << 20
"""A first answer reads at most about this much of a file; a thread reads the rest."""
BACKGROUND_SECONDS = 0.2
"""The thread begins after the first answer was sent: reading keeps the interpreter busy."""
SAMPLES = 400
"""How many lines a first answer takes from a file that is larger."""
_LINE_BYTES = 4096
Column = NDArray[np.float64]


class MetricsLine(msgspec.Struct):
    """One line of the file: a committed step."""

    step: int
    time: float = 0.0
    world_size: int = 0
    samples: int = 0
    generation: int = 0
    learning_rate: float | None = None
    metrics: dict[str, Any] = {}


# Made once, at import: two threads that are the first to decode a type together crash msgspec 0.22.
_DECODER = msgspec.json.Decoder(MetricsLine)
FIXED = ("step", "time", "world_size", "samples", "generation", "learning_rate")


class MetricsIndex:
    """Follows one file. Threads may share it.

    `columns` returns arrays of equal length, one per field and one per metric, sorted by step. A run that was
    restored from a checkpoint repeats steps; then only the last value of a step is kept. A line that cannot be
    read is skipped, and an incomplete last line is read once the rest of it is written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._position = 0
        self._inode = 0
        self._rows: dict[str, list[float]] = {name: [] for name in FIXED}
        self._arrays: dict[str, Column] | None = None
        self._reader: threading.Thread | None = None

    def columns(self, *, quick: bool = False) -> dict[str, Column]:
        """The columns of all lines; with `quick`, of some lines if most of a large file was not read yet.

        After a quick answer a thread reads the file, so that a later call has all lines.
        """
        if quick and self._unread() > QUICK_BYTES:
            self._read_in_background()
            return self._sampled()
        with self._lock:
            self._refresh()
            if self._arrays is None:
                self._arrays = {n: np.array(v, dtype=float) for n, v in self._rows.items()}
            return self._arrays

    def last(self) -> MetricsLine | None:
        """The newest line, from the end of the file alone."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - 4 * _LINE_BYTES))
                lines = file.read().split(b"\n")[:-1]
        except OSError:
            return None
        return next((found for line in reversed(lines) for found in _decode(line)), None)

    def close(self) -> None:
        """Wait for the thread that reads, if there is one."""
        if self._reader is not None:
            self._reader.join()

    def _unread(self) -> int:
        try:
            return self._path.stat().st_size - self._position
        except OSError:
            return 0

    def _read_in_background(self) -> None:
        with self._lock:
            if self._reader is None or not self._reader.is_alive():
                self._reader = threading.Timer(BACKGROUND_SECONDS, self.columns)
                self._reader.daemon = True
                self._reader.start()

    def _sampled(self) -> dict[str, Column]:
        rows: dict[str, list[float]] = {name: [] for name in FIXED}
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                for number in range(SAMPLES):
                    file.seek(number * size // SAMPLES)
                    parts = file.read(_LINE_BYTES).split(b"\n")
                    for line in parts[1 if number else 0 :][:1]:
                        for found in _decode(line):
                            _append(rows, found)
        except OSError:
            pass
        last = self.last()
        if last is not None:
            _append(rows, last)
        return {name: np.array(values, dtype=float) for name, values in rows.items()}

    def _refresh(self) -> None:
        try:
            with self._path.open("rb") as file:
                self._start_again_if_replaced(file)
                file.seek(self._position)
                data = file.read()
        except OSError:
            return
        end = data.rfind(b"\n") + 1
        if end:
            self._position += end
            self._arrays = None
            _extend(self._rows, _decode_all(data[:end]))

    def _start_again_if_replaced(self, file: Any) -> None:
        size, inode = file.seek(0, 2), _inode(self._path)
        if size < self._position or inode != self._inode:
            self._position, self._inode, self._arrays = 0, inode, None
            self._rows = {name: [] for name in FIXED}


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _decode_all(data: bytes) -> list[MetricsLine]:
    try:
        return _DECODER.decode_lines(data)
    except (msgspec.DecodeError, ValueError):
        return [found for line in data.split(b"\n") for found in _decode(line)]


def _decode(line: bytes) -> list[MetricsLine]:
    try:
        return [_DECODER.decode(line)]
    except (msgspec.DecodeError, ValueError):
        return []


def _extend(rows: dict[str, list[float]], lines: list[MetricsLine]) -> None:
    """Add lines, all at once if they continue the steps and have the known metrics, as almost all do."""
    steps = [line.step for line in lines]
    last = rows["step"][-1] if rows["step"] else -1
    if not all(map(operator.lt, [last, *steps], steps)):
        for line in lines:
            _append(rows, line)
        return
    count = len(rows["step"])
    for name in FIXED:
        rows[name] += [_float(getattr(line, name)) for line in lines]
    for name in {name for line in lines for name in line.metrics} - set(rows):
        rows[name] = [math.nan] * count
    for name in set(rows) - set(FIXED):
        rows[name] += [_float(line.metrics.get(name)) for line in lines]


def _float(value: object) -> float:
    return float(value) if type(value) in (int, float) else math.nan  # type: ignore[arg-type]  # a number


def _append(rows: dict[str, list[float]], line: MetricsLine) -> None:
    """Add a line; the steps from this one on, if there are any, were lost and are removed first."""
    steps = rows["step"]
    while steps and steps[-1] >= line.step:
        for values in rows.values():
            values.pop()
    for name in FIXED:
        rows[name].append(_float(getattr(line, name)))
    for name in line.metrics:
        if name not in rows and name not in FIXED:
            rows[name] = [math.nan] * (len(steps) - 1)
    for name, values in rows.items():
        if name not in FIXED:
            values.append(_float(line.metrics.get(name)))


def throughput(columns: dict[str, Column]) -> Column:
    """Samples per second at each step, from the times of the steps before; the first one is NaN."""
    times, samples = columns["time"], columns["samples"]
    found = np.full(len(times), np.nan)
    if len(times) > 1:
        with np.errstate(divide="ignore", invalid="ignore"):
            gaps = np.diff(times)
            found[1:] = np.where(gaps > 0, samples[1:] / gaps, np.nan)
    return found


def downsample(xs: Column, ys: Column, buckets: int) -> list[tuple[float, float]]:
    """At most `2 * buckets` points of a curve: the lowest and the highest of each bucket, in their order.

    Points whose value is not finite are left out.
    """
    usable = np.isfinite(xs) & np.isfinite(ys)
    xs, ys = xs[usable], ys[usable]
    if len(xs) <= 2 * buckets:
        return list(zip(xs.tolist(), ys.tolist(), strict=True))
    chosen: set[int] = {0, len(xs) - 1}
    edges = np.linspace(0, len(xs), buckets + 1).astype(int)
    for first, last in pairwise(edges):
        part = ys[first:last]
        chosen.add(int(first + part.argmin()))
        chosen.add(int(first + part.argmax()))
    order = sorted(chosen)
    return list(zip(xs[order].tolist(), ys[order].tolist(), strict=True))
