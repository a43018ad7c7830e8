"""Which store and catalog a command means, and which checkpoint a name means.

`--run-dir` names the folder of a run, which says where its checkpoints are. Without it, `--store` and
`--catalog` name both. Without any of them, the only run under `./runs` that has checkpoints is meant; if there
is none, the default store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tensorforge import environment
from tensorforge.catalog import CheckpointManager, CheckpointRecord, CheckpointState, GcPolicy
from tensorforge.catalog.checkpoint_location import (
    CATALOG_FILE,
    LOCATION_FILE,
    CheckpointLocation,
)
from tensorforge.checkpoint import store_index
from tensorforge.errors import EncodingError, InvalidInputError, NotFoundError
from tensorforge.storage.blobs import BlobStore
from tensorforge.storage.opening import open_store

LATEST = "latest"
RUNS_FOLDER = "runs"

Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar=environment.STORE.name,
        help="Folder or URL of the store; by default that of the only run under ./runs.",
    ),
]
Catalog = Annotated[
    str | None,
    typer.Option(
        "--catalog",
        envvar=environment.CATALOG.name,
        help="SQLite file or database URL; by default catalog.db in the store's folder.",
    ),
]
RunDir = Annotated[
    Path | None,
    typer.Option("--run-dir", help="The folder of a run, in place of --store and --catalog."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class Place:
    """Where checkpoints are. `run` is the run that a run's folder belongs to; `None` for all runs."""

    store: str
    catalog: str | None
    run: str | None = None

    @contextlib.contextmanager
    def opened_store(self) -> Iterator[BlobStore]:
        """The store, closed at the end of the block."""
        with contextlib.closing(open_store(self.store)) as store:
            yield store

    @contextlib.contextmanager
    def opened_catalog(
        self, store: BlobStore, policy: GcPolicy | None = None
    ) -> Iterator[CheckpointManager]:
        """The catalog, whose deletions remove files from `store`; closed at the end of the block."""
        location = CheckpointLocation(
            store=self.store, catalog=self.catalog, training_run_id=self.run or "default"
        )
        with location.open_catalog(store, policy) as manager:
            yield manager

    @property
    def has_catalog(self) -> bool:
        """Whether there are records: in a database that exists, or in the manifests."""
        return self.catalog is None or "://" in self.catalog or Path(self.catalog).exists()


def find_place(store: str | None, catalog: str | None, run_dir: Path | None) -> Place:
    """The store and the catalog that the options of a command name; see the module's docstring."""
    folder = run_dir
    if folder is None and store is None and catalog is None:
        folder = _only_run(Path(RUNS_FOLDER))
    if folder is not None:
        location = CheckpointLocation.read(folder)
        return Place(location.store, location.catalog, location.training_run_id)
    chosen = store or str(environment.STORE.default)
    return Place(chosen, catalog or _default_catalog(chosen))


def _default_catalog(store: str) -> str:
    inside = Path(store) / CATALOG_FILE
    if "://" not in store and inside.exists():
        return str(inside)
    return str(environment.CATALOG.default)


def _only_run(folder: Path) -> Path | None:
    """The only run below a folder that has checkpoints, or of several the only one that is active."""
    found = [path.parent for path in sorted(folder.glob(f"*/{LOCATION_FILE}"))]
    if len(found) > 1:
        found = [each for each in found if _is_active(each)] or found
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise InvalidInputError(f"name the run with --run-dir; these have checkpoints: {names}")
    return found[0] if found else None


def _is_active(folder: Path) -> bool:
    from tensorforge.launch.run_directory import read_record

    try:
        return read_record(folder).launcher.is_running()
    except (NotFoundError, EncodingError):
        return False


def find_prefix(place: Place, store: BlobStore, name: str) -> str:
    """The prefix of the checkpoint that a user names: by prefix, by id, or as `latest`.

    An unknown name is returned as it is; reading its manifest is then an error that says so.
    """
    if name == LATEST:
        return _latest_prefix(place, store)
    if store_index.exists(store, name):
        return name
    for prefix, _ in store_index.manifest_blobs(store):
        if prefix.rpartition("/")[2] == name:
            return prefix
    if place.has_catalog:
        with place.opened_catalog(store) as manager:
            record = manager.get(name)
        if record is not None and record.state is not CheckpointState.DELETED:
            return record.storage_path
    return name


def _latest_prefix(place: Place, store: BlobStore) -> str:
    if place.has_catalog:
        with place.opened_catalog(store) as manager:
            run = find_run(place, manager)
            record = None if run is None else manager.get_latest(run)
        if record is not None:
            return record.storage_path
    by_age = store_index.prefixes_by_age(store)
    if not by_age:
        raise NotFoundError(f"there is no checkpoint in {store.url}")
    return by_age[0]


def find_run(place: Place, manager: CheckpointManager, run: str | None = None) -> str | None:
    """The run that is meant: the named one, that of the place, or the only one in the catalog."""
    if run is not None or place.run is not None:
        return run or place.run
    runs = manager.list_runs()
    return runs[0].training_run_id if len(runs) == 1 else None


def require_run(place: Place, manager: CheckpointManager, run: str | None) -> str:
    """As `find_run`; `InvalidInputError` if the catalog has several runs, `NotFoundError` if it has none."""
    found = find_run(place, manager, run)
    if found is not None:
        return found
    names = ", ".join(each.training_run_id for each in manager.list_runs())
    if not names:
        raise NotFoundError(f"the catalog {place.catalog} has no checkpoint")
    raise InvalidInputError(f"name the run; the catalog has {names}")


def latest_record(place: Place, manager: CheckpointManager, run: str | None) -> CheckpointRecord:
    """The newest restorable checkpoint of a run; `NotFoundError` if there is none."""
    wanted = require_run(place, manager, run)
    record = manager.get_latest(wanted)
    if record is None:
        raise NotFoundError(f"run {wanted!r} has no checkpoint that can be restored")
    return record


def best_record(
    place: Place, manager: CheckpointManager, metric: str, *, higher_is_better: bool
) -> CheckpointRecord:
    """The complete checkpoint of a run with the best metric; `NotFoundError` names the metrics there are."""
    run = require_run(place, manager, None)
    worst = float("-inf") if higher_is_better else float("inf")
    found = manager.find_by_metric(run, metric, worst, ascending=not higher_is_better)
    if not found:
        known = sorted({name for record in manager.list_for_run(run) for name in record.metrics})
        raise NotFoundError(
            f"no checkpoint of run {run!r} has the metric {metric!r}; "
            f"recorded are {', '.join(known) or 'none'}"
        )
    return found[0]
