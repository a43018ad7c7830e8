"""The checkpoints of a run: timeline, chains, retention, restore plan, verify, diff, download."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from tensorforge.catalog import CheckpointManager, CheckpointRecord, RestoreCriteria, verify
from tensorforge.catalog.chains.retention import RetentionDecision
from tensorforge.catalog.checkpoint_location import CheckpointLocation
from tensorforge.catalog.manager import RestorePlan
from tensorforge.checkpoint import store_index
from tensorforge.checkpoint.checkpoint_diff import compare_tensors
from tensorforge.dashboard.page_context import PageContext, go, read_form, visitor_of
from tensorforge.dashboard.page_renderer import show_size
from tensorforge.dashboard.sessions import CONTROL, OBSERVE
from tensorforge.errors import EncodingError, InvalidInputError, NotFoundError
from tensorforge.storage.blobs import BlobStore
from tensorforge.storage.opening import open_store

_CONVERT_SECONDS = 600


@dataclass(frozen=True, slots=True)
class CheckpointList:
    """The checkpoints of one run: all records, the retention decisions, and the plan of a restore."""

    place: CheckpointLocation
    records: tuple[CheckpointRecord, ...]
    decisions: tuple[RetentionDecision, ...]
    plan: RestorePlan

    @property
    def taken_next(self) -> tuple[RetentionDecision, ...]:
        """What garbage collection would delete now."""
        return tuple(decision for decision in self.decisions if not decision.keep)


class CheckpointPages:
    """The handlers of the pages about checkpoints."""

    def __init__(self, context: PageContext) -> None:
        self._context = context

    def routes(self) -> list[Route]:
        """The routes of these pages."""
        return [
            Route("/runs/{run}/checkpoints", self.index),
            Route("/runs/{run}/checkpoints/diff", self.diff),
            Route("/runs/{run}/checkpoints/{checkpoint}/verify", self.verify, methods=["POST"]),
            Route("/runs/{run}/checkpoints/{checkpoint}/download", self.download),
        ]

    async def index(self, request: Request) -> Response:
        """All checkpoints of a run."""
        visitor = visitor_of(request, OBSERVE)
        run = self._context.runs.get(request.path_params["run"]).run_id
        found = await self._context.run(lambda: [read_list(each) for each in self._places(run)])
        return self._context.page(
            request,
            "checkpoints.html",
            run=run,
            lists=[(each, timeline(each.records)) for each in found],
            may_control=visitor.may(CONTROL),
        )

    async def diff(self, request: Request) -> Response:
        """What differs between two checkpoints."""
        visitor_of(request, OBSERVE)
        run, query = request.path_params["run"], request.query_params
        ids = (query.get("first", ""), query.get("second", ""))
        differences = await self._context.run(self._compare, run, *ids)
        return self._context.page(
            request, "checkpoint_diff.html", run=run, ids=ids, differences=differences
        )

    async def verify(self, request: Request) -> Response:
        """Read every byte of a checkpoint and record the outcome."""
        visitor_of(request, CONTROL)
        await read_form(request)
        run, checkpoint = request.path_params["run"], request.path_params["checkpoint"]

        def work() -> str:
            with self._opened(run, checkpoint) as (manager, store, _):
                report = verify(manager, store, checkpoint)
            return "it is intact" if report.is_valid else report.errors[0].message

        outcome = await self._context.run(work)
        path = f"/runs/{quote(run, safe='')}/checkpoints"
        return go(request, path, f"read every byte of {checkpoint}: {outcome}")

    async def download(self, request: Request) -> Response:
        """The tensors of a checkpoint as one safetensors file, written by a process of its own."""
        visitor_of(request, OBSERVE)
        run, checkpoint = request.path_params["run"], request.path_params["checkpoint"]
        folder = Path(tempfile.mkdtemp(prefix="tensorforge-download-"))
        try:
            path = await self._context.run(self._convert, run, checkpoint, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        remove = BackgroundTask(shutil.rmtree, folder, ignore_errors=True)
        name = f"{checkpoint}.safetensors"
        return FileResponse(path, filename=name, background=remove)

    def _convert(self, run: str, checkpoint: str, folder: Path) -> Path:
        with self._opened(run, checkpoint) as (_, _, (place, record)):
            path = folder / "checkpoint.safetensors"
            words = ["convert", record.storage_path, str(path), "--to", "safetensors"]
            command = [sys.executable, "-m", "tensorforge", "checkpoint", *words]
            done = subprocess.run(  # noqa: S603  our own command; no shell
                [*command, "--store", place.store, "--json"],
                capture_output=True,
                text=True,
                timeout=_CONVERT_SECONDS,
                check=False,
            )
        if done.returncode != 0:
            raise InvalidInputError(f"cannot be converted: {done.stderr.strip()[-500:]}")
        return path

    def _compare(self, run: str, first: str, second: str) -> dict[str, list[str]]:
        with (
            self._opened(run, first) as (_, store, (_, before)),
            self._opened(run, second) as (_, _, (_, after)),
        ):
            old, new = (store_index.read_manifest(store, r.storage_path) for r in (before, after))
            return compare_tensors(store, old, new)

    def _places(self, run: str) -> list[CheckpointLocation]:
        """Where the run has checkpoints: as it wrote into its folder, and in the catalog of the settings."""
        source, found = self._context.runs.get(run), []
        if source.folder is not None:
            with contextlib.suppress(NotFoundError, EncodingError):
                found.append(CheckpointLocation.read(source.folder))
        if self._context.catalog is not None and self._context.store is not None:
            given = CheckpointLocation.of(self._context.store, self._context.catalog, run)
            if has_catalog(given) and _has_run(given):
                found.append(given)
        return [place for place in found if has_catalog(place)]

    @contextlib.contextmanager
    def _opened(self, run: str, checkpoint: str) -> Iterator[Any]:
        for place in self._places(run):
            with opened(place) as (manager, store):
                record = manager.get(checkpoint)
                if record is not None and record.training_run_id == place.training_run_id:
                    yield manager, store, (place, record)
                    return
        raise NotFoundError(f"the run {run!r} has no checkpoint {checkpoint[:100]!r}")


@contextlib.contextmanager
def opened(place: CheckpointLocation) -> Iterator[tuple[CheckpointManager, BlobStore]]:
    """The catalog and the store of a place, closed at the end of the block."""
    with (
        contextlib.closing(open_store(place.store)) as store,
        place.open_catalog(store) as manager,
    ):
        yield manager, store


def has_catalog(place: CheckpointLocation) -> bool:
    """Whether there are records: opening a catalog that does not exist would make one."""
    catalog = place.catalog
    return catalog is None or "://" in catalog or Path(catalog).exists()


def _has_run(place: CheckpointLocation) -> bool:
    with opened(place) as (manager, _):
        return any(each.training_run_id == place.training_run_id for each in manager.list_runs())


def read_list(place: CheckpointLocation) -> CheckpointList:
    """The checkpoints at a place, the newest first."""
    run = place.training_run_id
    with opened(place) as (manager, _):
        records = sorted(manager.list_for_run(run), key=lambda each: each.recency, reverse=True)
        return CheckpointList(
            place,
            tuple(records),
            tuple(manager.retention(training_run_id=run)),
            manager.restore_plan(RestoreCriteria(training_run_id=run)),
        )


def timeline(records: tuple[CheckpointRecord, ...]) -> Markup:
    """The checkpoints over steps; a line leads from each increment to its parent."""
    if not records:
        return Markup("")
    steps = [record.step for record in records]
    low, span = min(steps), max(1, max(steps) - min(steps))
    places = {r.checkpoint_id: 20 + (r.step - low) / span * 960 for r in records}
    drawn = []
    for record in records:
        x = places[record.checkpoint_id]
        if record.parent_id in places:
            parent = places[str(record.parent_id)]
            path = f"M{x:.1f} 40C{x:.1f} 5 {parent:.1f} 5 {parent:.1f} 40"
            drawn.append(Markup('<path class="chain" d="{}"/>').format(path))
    for record in records:
        x = places[record.checkpoint_id]
        text = (
            f"Step {record.step}, {record.checkpoint_type.value}, {record.state.value}, "
            f"{show_size(record.size_bytes)}"
        )
        drawn.append(
            Markup(
                '<g class="mark" tabindex="0" role="img" aria-label="{0}"><title>{0}</title>'
                '<circle class="checkpoint {1} {2}" cx="{3:.1f}" cy="40" r="9"/></g>'
            ).format(text, record.checkpoint_type.value, record.state.value, x)
        )
    return Markup(
        '<figure class="timeline"><figcaption>Steps {} to {}; an arc leads from an increment to '
        'its parent</figcaption><svg viewBox="0 0 1000 60" role="group" aria-label="Checkpoints by step">'
        "{}</svg></figure>"
    ).format(min(steps), max(steps), Markup("").join(drawn))
