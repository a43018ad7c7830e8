"""Where the checkpoints of a run are: the store, the catalog and the run's name, kept in the run's folder.

Training writes `checkpoints.json` into the folder of its run; the commands read it. Imports no torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tensorforge.catalog.chains.records import GcPolicy
from tensorforge.catalog.manager import CheckpointManager
from tensorforge.catalog.stored_records import remover
from tensorforge.catalog.upkeep import rebuild
from tensorforge.encoding import decode, encode
from tensorforge.errors import EncodingError, NotFoundError
from tensorforge.storage.blobs import BlobStore
from tensorforge.storage.database import IN_MEMORY

LOCATION_FILE = "checkpoints.json"
CATALOG_FILE = "catalog.db"
"""The catalog of a store that is a folder, unless another one is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLocation:
    """The store and the catalog of a run's checkpoints, as absolute paths or URLs.

    Without a `catalog` the records are made from the manifests whenever the checkpoints are opened.
    """

    store: str
    catalog: str | None
    training_run_id: str

    @classmethod
    def of(cls, store: str | Path, catalog: str | Path | None, training_run_id: str) -> Self:
        """The location for a store; by default the catalog of a folder is a file in it."""
        if catalog is None and not _is_url(store):
            catalog = Path(store) / CATALOG_FILE
        return cls(
            store=_absolute(store),
            catalog=None if catalog is None else _absolute(catalog),
            training_run_id=training_run_id,
        )

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The location that a run wrote into its folder; `NotFoundError` if it wrote none."""
        path = folder / LOCATION_FILE
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise NotFoundError(
                f"the run in {folder} has no checkpoints: there is no {LOCATION_FILE} in its folder; "
                "a run saves checkpoints if it has a CheckpointPlan"
            ) from error
        try:
            return decode(json.loads(text), cls)
        except ValueError as error:
            if isinstance(error, EncodingError):
                raise
            raise EncodingError(f"{path} is not JSON: {error}") from error

    def write(self, folder: Path) -> None:
        """Write the location into a run's folder, readable by its owner alone: a URL may have a password."""
        temporary = folder / f".{LOCATION_FILE}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(encode(self), file, indent=2)
            temporary.replace(folder / LOCATION_FILE)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def open_catalog(self, store: BlobStore, policy: GcPolicy | None = None) -> CheckpointManager:
        """The catalog, whose deletions remove files from `store`."""
        database = IN_MEMORY if self.catalog is None else self.catalog
        manager = CheckpointManager(policy, database=database, remove_files=remover(store))
        if self.catalog is None:
            rebuild(manager, store, old_run=self.training_run_id)
        return manager


def _is_url(address: str | Path) -> bool:
    return not isinstance(address, Path) and "://" in address


def _absolute(address: str | Path) -> str:
    return str(address) if _is_url(address) else str(Path(address).absolute())
