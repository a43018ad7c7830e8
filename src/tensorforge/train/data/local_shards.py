"""A packed data set of which each worker stores only the shards that it computes."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tensorforge.data.segments.packed_dataset import PackedDataset
from tensorforge.data.segments.shard_store import ShardStore
from tensorforge.errors import (
    CapacityError,
    ConflictError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
)
from tensorforge.storage.opening import open_store

log = logging.getLogger(__name__)

_MAX_PLACES = 1024


class LocalShards:
    """The map-style data set of a run whose workers keep their shards on local disks.

        data = LocalShards("s3://bucket/corpus", "/scratch/shards")
        Run(model, optimizer, data, RunConfig(batch_size=48, shuffle="within_shards"))

    `origin` is the folder or the URL of a packed data set, which `tensorforge data pack` writes. Each
    worker of a machine takes a subfolder of `folder`, a place, for itself; a worker that starts later takes
    over the place of a worker that is gone, and its shards. A sample that is not stored here yet, or whose
    copy is damaged, is read from the origin. `decode` turns a stored sample into what the collate function
    takes.
    """

    def __init__(
        self,
        origin: PackedDataset | str | Path,
        folder: str | Path,
        *,
        decode: Callable[[Any], Any] | None = None,
        max_concurrent_transfers: int = 4,
    ) -> None:
        if max_concurrent_transfers < 1:
            raise InvalidInputError(
                f"max_concurrent_transfers = {max_concurrent_transfers}: must be at least 1"
            )
        self.origin = (
            origin if isinstance(origin, PackedDataset) else PackedDataset(open_store(origin))
        )
        self.folder = Path(folder)
        self.max_concurrent_transfers = max_concurrent_transfers
        self._decode = decode
        self._lock: int | None = None
        self.store: ShardStore | None = None
        """The shards that are stored here; `None` until a run opens them."""
        self.damaged: Callable[[int], None] | None = None
        """Called with the number of a sample whose local copy was damaged and has been removed."""

    def open(self) -> ShardStore:
        """Take a place and open its store. Doing it again changes nothing."""
        if self.store is None:
            self._lock, place = _take_place(self.folder)
            try:
                self.store = ShardStore(place, self.origin.info)
            except ConflictError as error:
                self.close()
                raise ConflictError(f"{error}; give each data set a folder of its own") from error
        return self.store

    def close(self) -> None:
        """Give up the place; its shards stay for the next worker on this machine."""
        if self.store is not None:
            self.store.close()
            self.store = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __len__(self) -> int:
        return len(self.origin)

    def __getitem__(self, index: int) -> Any:
        sample = self._read(index)
        return sample if self._decode is None else self._decode(sample)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples with these numbers."""
        return [self[index] for index in indices]

    def _read(self, index: int) -> Any:
        if self.store is not None:
            try:
                return self.store[index]
            except NotFoundError:
                pass  # it has not arrived yet
            except IntegrityError as error:
                log.warning("%s; it is fetched again from the origin", str(error))
                self.store.drop(index)
                if self.damaged is not None:
                    self.damaged(index)
        return self.origin[index]


def _take_place(folder: Path) -> tuple[int, Path]:
    """Lock and return the first place that no living process has locked. The lock ends with this process."""
    for number in range(_MAX_PLACES):
        place = folder / f"place-{number}"
        place.mkdir(parents=True, exist_ok=True)
        lock = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return lock, place
    raise CapacityError(
        f"{folder}: all of {_MAX_PLACES} places are taken", requested=1, available=0
    )
