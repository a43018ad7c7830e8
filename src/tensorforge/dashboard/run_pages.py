"""The list of runs, the page of a run, the log of a process, and the orders that a person may give."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tensorforge.dashboard.charts import Mark, line_chart, steps_of
from tensorforge.dashboard.live_updates import KEEP_ALIVE_SECONDS, event_stream
from tensorforge.dashboard.metrics_index import FIXED, Column, downsample, throughput
from tensorforge.dashboard.page_context import (
    PageContext,
    go,
    read_form,
    require_confirmation,
    visitor_of,
    whole,
)
from tensorforge.dashboard.run_sources import RunSnapshot, RunSource, RunSummary
from tensorforge.dashboard.sessions import CONTROL, OBSERVE
from tensorforge.elastic.protocol.rescale_record import RescalePhase, RescaleRecord
from tensorforge.errors import InvalidInputError, NotFoundError
from tensorforge.launch.processes.bootstrap import STACKS_SIGNAL

BUCKETS = 400
PAGE = 200
MOST_CHARTS = 12
LOG_BYTES = 64 << 10
LOG_SECONDS = 0.3


class RunPages:
    """The handlers of the pages about runs."""

    def __init__(self, context: PageContext) -> None:
        self._context = context

    def routes(self) -> list[Route]:
        """The routes of these pages."""
        return [
            Route("/runs", self.index),
            Route("/runs/events", self.index_events),
            Route("/runs/{run}", self.show),
            Route("/runs/{run}/events", self.events),
            Route("/runs/{run}/scale", self.scale, methods=["POST"]),
            Route("/runs/{run}/leave", self.leave, methods=["POST"]),
            Route("/runs/{run}/stop", self.stop, methods=["POST"]),
            Route("/runs/{run}/stacks", self.stacks, methods=["POST"]),
            Route("/runs/{run}/logs/{process}", self.log),
            Route("/runs/{run}/logs/{process}/events", self.log_events),
        ]

    async def index(self, request: Request) -> Response:
        """The runs, the newest first."""
        visitor_of(request, OBSERVE)
        search, page = request.query_params.get("q", ""), _page(request)
        rows, total = await self._context.run(self._rows, search, page)
        live = f"/runs/events?q={quote(search)}&page={page}"
        return self._context.page(
            request, "runs.html", rows=rows, total=total, q=search, page=page, size=PAGE, live=live
        )

    async def index_events(self, request: Request) -> Response:
        """The list of runs, again when it changes."""
        visitor_of(request, OBSERVE)
        search, page = request.query_params.get("q", ""), _page(request)
        base = request.scope.get("root_path", "")

        def produce() -> dict[str, str]:
            rows, _ = self._rows(search, page)
            html = self._context.renderer.render("_runs_table.html", rows=rows, base=base)
            return {"runs-table": html}

        key = f"runs {page} {search}"
        return event_stream(self._context.broadcast(key, produce).stream())

    def _rows(self, search: str, page: int) -> tuple[list[RunSummary], int]:
        rows = [source.summary() for source in self._context.runs.all()]
        words = search.lower().split()
        rows = [
            row
            for row in rows
            if all(w in f"{row.run_id} {row.script} {row.state}".lower() for w in words)
        ]
        rows.sort(key=lambda row: (row.state != "running", -row.updated, row.run_id))
        return rows[page * PAGE : (page + 1) * PAGE], len(rows)

    async def show(self, request: Request) -> Response:
        """One run."""
        visitor = visitor_of(request, OBSERVE)
        source = self._source(request)
        base = request.scope.get("root_path", "")
        parts = await self._context.run(self._fragments, source, base, True)
        return self._context.page(
            request,
            "run.html",
            run=source.run_id,
            parts=parts,
            may_control=visitor.may(CONTROL),
            logs=list(source.logs()),
            workers=[] if (record := source.record()) is None else sorted(record.workers),
            has_checkpoints=source.folder is not None,
            live=f"/runs/{quote(source.run_id, safe='')}/events",
        )

    async def events(self, request: Request) -> Response:
        """The parts of a run's page, again when they change."""
        visitor_of(request, OBSERVE)
        source, base = self._source(request), request.scope.get("root_path", "")
        stream = self._context.broadcast(
            f"run {source.run_id}", lambda: self._fragments(source, base, False)
        )
        return event_stream(stream.stream())

    def _fragments(self, source: RunSource, base: str, quick: bool) -> dict[str, str]:
        snapshot = source.snapshot()
        columns = source.metrics.columns(quick=quick)
        values: dict[str, Any] = {
            "run": source.run_id,
            "base": base,
            "snapshot": snapshot,
            "charts": charts_of(columns, snapshot),
            "phases": list(RescalePhase),
            "memory": source.memory(),
            "rescales": [*reversed(snapshot.rescales)],
            "now": time.time(),
        }
        render = self._context.renderer.render
        names = ("state", "band", "charts", "workers", "rescales")
        return {f"run-{name}": render(f"_run_{name}.html", **values) for name in names}

    async def scale(self, request: Request) -> Response:
        """Ask for a number of workers; the newest request counts."""
        source, fields = await self._order(request)
        workers = whole(fields, "workers")
        await self._context.run(lambda: source.client().scale(workers, fields["by"]))
        return self._back(request, source, f"asked for {workers} workers")

    async def leave(self, request: Request) -> Response:
        """Let one worker leave after its step."""
        source, fields = await self._order(request)
        worker = fields.get("worker", "")
        await self._context.run(lambda: source.client().remove(worker, fields["by"]))
        return self._back(request, source, f"asked {worker} to leave")

    async def stop(self, request: Request) -> Response:
        """End the run."""
        source, fields = await self._order(request)
        reason = fields.get("reason", "").strip()
        if not reason:
            raise InvalidInputError("say why the run is stopped; the reason is recorded")
        await self._context.run(lambda: source.client().stop(reason, fields["by"]))
        return self._back(request, source, "asked the run to stop")

    async def stacks(self, request: Request) -> Response:
        """Have a worker of this machine write its stack into its log."""
        visitor_of(request, CONTROL)
        source, fields = self._source(request), await read_form(request)
        worker, record = fields.get("worker", ""), source.record()
        process = None if record is None else record.workers.get(worker)
        if process is None or not process.is_running():
            raise NotFoundError(f"no process of {worker[:100]!r} runs on this machine")
        os.kill(process.pid, STACKS_SIGNAL)
        run, name = quote(source.run_id, safe=""), quote(worker, safe="")
        return go(request, f"/runs/{run}/logs/{name}", "the stack follows in this log")

    async def log(self, request: Request) -> Response:
        """What a process printed last."""
        visitor_of(request, OBSERVE)
        source, path = self._log_path(request)
        text, position = await self._context.run(_read_end, path)
        run, name = quote(source.run_id, safe=""), quote(path.stem, safe="")
        return self._context.page(
            request,
            "run_log.html",
            run=source.run_id,
            process=path.stem,
            text=text,
            live=f"/runs/{run}/logs/{name}/events?from={position}",
        )

    async def log_events(self, request: Request) -> Response:
        """What a process prints from a position of its log on."""
        visitor_of(request, OBSERVE)
        _, path = self._log_path(request)
        given = request.headers.get("last-event-id") or request.query_params.get("from", "0")
        return event_stream(_follow(path, int(given) if given.isdecimal() else 0))

    async def _order(self, request: Request) -> tuple[RunSource, dict[str, str]]:
        visitor = visitor_of(request, CONTROL)
        fields = await read_form(request)
        require_confirmation(fields)
        return self._source(request), {**fields, "by": f"{visitor.name} (dashboard)"}

    def _source(self, request: Request) -> RunSource:
        return self._context.runs.get(request.path_params["run"])

    def _log_path(self, request: Request) -> tuple[RunSource, Path]:
        source, name = self._source(request), request.path_params["process"]
        path = source.logs().get(name)
        if path is None:
            raise NotFoundError(f"the run {source.run_id!r} has no log of {name[:100]!r}")
        return source, path

    def _back(self, request: Request, source: RunSource, done: str) -> Response:
        return go(request, f"/runs/{quote(source.run_id, safe='')}", done)


def charts_of(columns: dict[str, Column], snapshot: RunSnapshot) -> dict[str, Any]:
    """The charts of a run: workers with the rescales as marks, loss first, then the other metrics."""
    steps = columns["step"]

    def points(values: Column) -> list[tuple[float, float]]:
        return downsample(steps, values, BUCKETS)

    metrics = sorted(
        (name for name in columns if name not in FIXED), key=lambda n: (n != "loss", n)
    )
    drawn = [line_chart(name.capitalize(), points(columns[name])) for name in metrics[:MOST_CHARTS]]
    drawn.append(
        line_chart("Throughput", points(throughput(columns)), unit="samples/s", is_area=True)
    )
    drawn.append(line_chart("Learning rate", points(columns["learning_rate"])))
    marks = rescale_marks(columns, snapshot.rescales)
    band = steps_of(points(columns["world_size"]))
    return {"workers": line_chart("Workers", band, marks=marks, is_area=True), "metrics": drawn}


def rescale_marks(columns: dict[str, Column], rescales: tuple[RescaleRecord, ...]) -> list[Mark]:
    """A mark at the first step of each generation that has one."""
    generations, indexes = np.unique(columns["generation"], return_index=True)
    steps = columns["step"][indexes]
    first = dict(zip(generations.astype(int).tolist(), steps.tolist(), strict=True))
    last = float(columns["step"][-1]) if len(columns["step"]) else 0.0
    return [
        Mark(first.get(r.generation, last), rescale_text(r), f"rescale-{r.generation}")
        for r in rescales
    ]


def rescale_text(record: RescaleRecord) -> str:
    """One rescale as a sentence: size, reason, phases in milliseconds."""
    phases = ", ".join(f"{p.label} {ms:.0f} ms" for p, ms in record.milliseconds.items())
    sizes = f"{record.old_size} → {record.new_size} workers"
    return f"Generation {record.generation}: {sizes}. {record.reason}. {phases}"


def _page(request: Request) -> int:
    text = request.query_params.get("page", "0")
    return int(text) if text.isdecimal() and len(text) < 7 else 0


def _read_end(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_BYTES))
        data = file.read()
    return data.decode("utf-8", "replace"), size


async def _follow(path: Path, position: int) -> AsyncIterator[bytes]:
    silent = 0.0
    yield b"retry: 1000\n\n"
    while True:
        text, position = await run_in_threadpool(_read_from, path, position)
        if text:
            yield f"id: {position}\ndata: {json.dumps({'text': text})}\n\n".encode()
            silent = 0.0
        elif silent > KEEP_ALIVE_SECONDS:
            yield b": still here\n\n"
            silent = 0.0
        silent += LOG_SECONDS
        await asyncio.sleep(LOG_SECONDS)


def _read_from(path: Path, position: int) -> tuple[str, int]:
    """What was written since a position, at most the newest part of it, and the position after it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size <= position:
                return "", position
            file.seek(max(position, size - LOG_BYTES))
            return file.read(LOG_BYTES).decode("utf-8", "replace"), file.tell()
    except OSError:
        return "", position
