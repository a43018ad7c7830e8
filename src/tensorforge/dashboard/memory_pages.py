"""Traces of memory: bytes in use over time, fragmentation, the blocks of a pool, and what would fit."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tensorforge.dashboard.charts import line_chart, rectangles
from tensorforge.dashboard.metrics_index import downsample
from tensorforge.dashboard.page_context import PageContext, visitor_of
from tensorforge.dashboard.page_renderer import show_size
from tensorforge.dashboard.sessions import OBSERVE
from tensorforge.errors import InvalidInputError, NotFoundError
from tensorforge.memory.traces.bundled_traces import bundled_trace, bundled_traces
from tensorforge.memory.traces.pool_advice import advise_pool
from tensorforge.memory.traces.replay import replay_trace
from tensorforge.memory.traces.torch_snapshot import load_trace
from tensorforge.memory.traces.trace import AllocationTrace

_MOST_BLOCKS = 600
_BUCKETS = 400
_MEGABYTE = 1 << 20
_POLICY = "best-fit"
TRACES_FOLDER = "traces"
"""The folder in a run's folder whose traces are shown."""


class MemoryPages:
    """The handlers of the pages about memory."""

    def __init__(self, context: PageContext) -> None:
        self._context = context

    def routes(self) -> list[Route]:
        """The routes of these pages."""
        return [Route("/memory", self.index), Route("/memory/{trace}", self.show)]

    async def index(self, request: Request) -> Response:
        """The traces that can be opened."""
        visitor_of(request, OBSERVE)
        files = await self._context.run(self._files)
        return self._context.page(request, "memory.html", bundled=bundled_traces(), files=files)

    async def show(self, request: Request) -> Response:
        """One trace, and whether it fits into a pool of the size that a person asks about."""
        visitor_of(request, OBSERVE)
        name = request.path_params["trace"]
        capacity = parse_megabytes(request.query_params.get("megabytes", ""))
        path = (
            None if name in bundled_traces() else (await self._context.run(self._files)).get(name)
        )
        if path is None and name not in bundled_traces():
            raise NotFoundError(f"there is no trace {name[:100]!r}")
        stamp = 0 if path is None else path.stat().st_mtime_ns
        facts = await self._context.run(describe_trace, name, path, stamp, capacity)
        return self._context.page(request, "trace.html", name=name, capacity=capacity, **facts)

    def _files(self) -> dict[str, Path]:
        found = {path.name: path for path in self._context.traces if path.is_file()}
        for source in self._context.runs.all():
            if source.folder is not None:
                for path in sorted((source.folder / TRACES_FOLDER).glob("*.json*")):
                    found[f"{source.run_id}: {path.name}"] = path
        return found


def parse_megabytes(text: str) -> int | None:
    """The bytes of a number of MiB; `None` for an empty text."""
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise InvalidInputError(f"{text[:40]!r}: must be a positive number of MiB")
    return int(value * _MEGABYTE)


@lru_cache(maxsize=16)
def describe_trace(
    name: str,
    path: Path | None,
    stamp: int,  # noqa: ARG001  part of the cache's key
    capacity: int | None,
) -> dict[str, Any]:
    """Advice and charts about a trace. `stamp` is the file's time, so that a changed file is read again."""
    trace = bundled_trace(name) if path is None else load_trace(str(path))
    replay = replay_trace(trace, _POLICY)
    times = np.array([event.time for event in trace.events])
    live = np.array(trace.live_bytes(), dtype=float) / _MEGABYTE
    reserved = np.array(replay.reserved, dtype=float) / _MEGABYTE
    holes = np.where(reserved > 0, (reserved - live) / np.maximum(reserved, 1e-9) * 100, 0.0)
    curve = downsample(times, live, _BUCKETS)
    limit = None if capacity is None else capacity / _MEGABYTE
    return {
        "advice": advise_pool(trace, capacity=capacity),
        "allocations": trace.allocations,
        "live": line_chart(
            "In use (line) and needed by best fit (dashed)",
            curve,
            unit="MiB",
            over="second",
            is_area=True,
            shows_peak=True,
            limit=limit,
            second=downsample(times, reserved, _BUCKETS),
        ),
        "holes": line_chart(
            "Share of the pool that is holes",
            downsample(times, holes, _BUCKETS),
            unit="%",
            over="second",
            is_area=True,
            shows_peak=True,
        ),
        "blocks": _block_map(trace, replay),
    }


def _block_map(trace: AllocationTrace, replay: Any) -> Markup:
    """The largest blocks as boxes: time to the right, address upwards."""
    lifetimes = sorted(trace.lifetimes(), key=lambda life: -life.size * (life.stop - life.start))
    boxes = []
    for life in lifetimes[:_MOST_BLOCKS]:
        label = life.label or "block"
        text = f"{label}: {show_size(life.size)} at {show_size(replay.position(life.block))}"
        place = float(replay.position(life.block))
        boxes.append(
            (float(life.start), place, float(life.stop - life.start), float(life.size), text)
        )
    title = "The largest blocks in a pool with best fit: events to the right, addresses upwards"
    return rectangles(title, boxes, width=max(1, len(trace)), height=max(1, replay.peak_reserved))
