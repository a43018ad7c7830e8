"""Batches of any map-style data set, in the order of an epoch, loaded ahead of time.

torch's `DataLoader` loads them, so collate functions, worker processes and pinned memory work as in torch.
Three things are added: order and ledger decide which samples a batch has, a thread loads ahead if there are no
worker processes, and a batch names its positions, so that the caller can commit them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from tensorforge.data.plan.ledger import Ledger
from tensorforge.data.plan.order import Order
from tensorforge.data.plan.shards import DataShard
from tensorforge.errors import InvalidInputError, UnavailableError

_END: Final = object()

Ready = Callable[[DataShard], None]
"""Called with positions before they are read; returns once their samples are available, or raises."""

Requests = Callable[[], Iterator[DataShard]]
"""Starts a new iteration over the positions of all batches; the sampler and the loader each need one."""


@dataclass(frozen=True, slots=True)
class ShardBatch:
    """A micro-batch: `positions` is the range to commit, with the shard's number; `data` is collated."""

    positions: DataShard
    data: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """How batches are loaded; `num_workers`, `pin_memory` and `collate_fn` are torch's.

    `prefetch` batches are loaded ahead by a thread, or by each of `num_workers` processes; 0 means none.
    `pin_memory` has an effect only if there is an accelerator. A loading process that dies is an
    `UnavailableError`. `ready` waits for shards that are still being transferred.
    """

    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    pin_memory: bool = False
    prefetch: int = 2
    ready: Ready | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 0 or self.prefetch < 0:
            raise InvalidInputError(
                f"num_workers = {self.num_workers}, prefetch = {self.prefetch}: must not be negative"
            )


class ShardLoader:
    """The micro-batches of one shard from the position `cursor` (default: its start) to its end.

    Each iteration starts from the beginning. Leaving the loop early stops the loading thread or processes.
    """

    def __init__(
        self,
        dataset: Any,
        order: Order,
        shard: DataShard,
        cursor: int | None = None,
        batch_size: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch: int = 2,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        ready: Ready | None = None,
    ) -> None:
        start = shard.start_index if cursor is None else cursor
        if not shard.start_index <= start <= shard.end_index:
            raise InvalidInputError(f"cursor = {start}: not within {shard}")
        if batch_size < 1:
            raise InvalidInputError(f"batch_size = {batch_size}: must be at least 1")
        self._dataset, self._order = dataset, order
        self._options = LoaderOptions(
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch=prefetch,
            ready=ready,
        )
        self._batches = [
            DataShard(shard.shard_id, low, min(low + batch_size, shard.end_index))
            for low in range(start, shard.end_index, batch_size)
        ]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[ShardBatch]:
        return load(self._dataset, self._order, lambda: iter(self._batches), self._options)


class StepLoader:
    """For each step from the ledger's state to the epoch's end, the micro-batches of the given shards.

    A step in which none of these shards has remaining samples is an empty tuple: other workers compute it,
    and every worker commits it.
    """

    def __init__(
        self,
        dataset: Any,
        order: Order,
        ledger: Ledger,
        shard_ids: Iterable[int],
        batch_size: int,
        options: LoaderOptions | None = None,
    ) -> None:
        self._dataset, self._order = dataset, order
        self._options = options or LoaderOptions()
        self._ledger, self._shard_ids, self._batch_size = ledger, frozenset(shard_ids), batch_size

    def __iter__(self) -> Iterator[tuple[ShardBatch, ...]]:
        def requests() -> Iterator[DataShard]:
            return (batch for step in self._steps() for batch in step)

        batches = load(self._dataset, self._order, requests, self._options)
        try:
            for step in self._steps():
                yield tuple(next(batches) for _ in step)
        finally:
            batches.close()

    def _steps(self) -> Iterator[tuple[DataShard, ...]]:
        """For each step, the positions that it takes from the given shards."""
        for taken in self._ledger.steps(self._batch_size):
            yield tuple(batch for batch in taken if batch.shard_id in self._shard_ids)


def load(
    dataset: Any, order: Order, requests: Requests, options: LoaderOptions
) -> Generator[ShardBatch, None, None]:
    """Load the data of each request, in order and ahead of time."""
    ahead = options.prefetch if options.num_workers else 0
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=_Samples(order, requests, options.ready),
        num_workers=options.num_workers,
        pin_memory=options.pin_memory and torch.accelerator.is_available(),
        collate_fn=options.collate_fn,
        prefetch_factor=max(1, ahead) if options.num_workers else None,
    )
    if options.num_workers or not options.prefetch:
        batches: Iterator[Any] = iter(loader)
    else:
        batches = _ahead(iter(loader), options.prefetch)
    try:
        for positions in requests():
            yield ShardBatch(positions, next(batches))
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise UnavailableError(f"a loading process died: {error}") from error
    finally:
        if hasattr(batches, "close"):
            batches.close()


class _Samples:
    """A batch sampler for torch: yields the sample numbers of each batch."""

    def __init__(self, order: Order, requests: Requests, ready: Ready | None) -> None:
        self._order, self._requests, self._ready = order, requests, ready

    def __iter__(self) -> Iterator[list[int]]:
        for positions in self._requests():
            if self._ready is not None:
                self._ready(positions)
            yield self._order.take(positions.start_index, positions.end_index).tolist()


def _ahead(source: Iterator[Any], depth: int) -> Iterator[Any]:
    """The items of `source`; a thread produces up to `depth` of them ahead and ends with this generator."""
    with ThreadPoolExecutor(1, "shard-loader") as thread:
        pending = deque(thread.submit(next, source, _END) for _ in range(depth))
        try:
            while (item := pending.popleft().result()) is not _END:
                pending.append(thread.submit(next, source, _END))
                yield item
        finally:
            for future in pending:
                future.cancel()
