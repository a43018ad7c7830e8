"""Batches from any map-style data set, in the order of the ledger, loaded ahead of time.

torch's `DataLoader` does the loading, so collate functions, worker processes and pinned memory are its
own. What is added: which samples make a batch follows from order and ledger, a thread loads ahead when there
are no worker processes, and a batch says which positions it has, so that they can be committed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from tensorforge.data.plan.ledger import Ledger
from tensorforge.data.plan.order import Order
from tensorforge.data.plan.shards import DataShard
from tensorforge.errors import InvalidInputError, UnavailableError

Ready = Callable[[DataShard], None]
"""Called with positions before they are read; returns when their samples are here, or raises."""


@dataclass(frozen=True, slots=True)
class ShardBatch:
    """A micro-batch: `positions` are the shard's number and the range to commit, `data` is collated."""

    positions: DataShard
    data: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """How batches are loaded; `num_workers`, `pin_memory` and `collate_fn` are torch's.

    `prefetch` batches are loaded ahead: by a thread, or by each of `num_workers` processes; 0 means none.
    Without an accelerator there is nothing to pin memory for, and `pin_memory` changes nothing. A process
    that dies is an `UnavailableError`. `ready` is for shards that may still be on their way.
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
    """The micro-batches of one shard from `cursor` (a position; its start if `None`) to its end.

    Iterating again starts again. Leaving the loop early stops the thread or processes that load.
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
        return load(self._dataset, self._order, self._batches, self._options)


class StepLoader:
    """Step by step, the micro-batches of the shards that live here, from a ledger on to the epoch's end.

    A step in which none of these shards has samples left is an empty tuple: the step takes place
    elsewhere, and is committed everywhere.
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
        self._steps = _Steps(ledger, frozenset(shard_ids), batch_size)

    def __iter__(self) -> Iterator[tuple[ShardBatch, ...]]:
        batches = load(self._dataset, self._order, _Flat(self._steps), self._options)
        try:
            for step in self._steps:
                yield tuple(next(batches) for _ in step)
        finally:
            batches.close()


class _Steps:
    """What each step takes from some of the shards; iterating again starts again."""

    def __init__(self, ledger: Ledger, here: frozenset[int], batch_size: int) -> None:
        self._ledger, self._here, self._batch_size = ledger, here, batch_size

    def __iter__(self) -> Iterator[tuple[DataShard, ...]]:
        for taken in self._ledger.steps(self._batch_size):
            yield tuple(batch for batch in taken if batch.shard_id in self._here)


class _Flat:
    """The batches of steps, one after the other."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[DataShard]:
        return (batch for step in self._steps for batch in step)


def load(
    dataset: Any, order: Order, requests: Iterable[DataShard], options: LoaderOptions
) -> Generator[ShardBatch, None, None]:
    """The data of each request, in order, loaded ahead as the options say; `requests` is iterated twice."""
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
        for positions in requests:
            yield ShardBatch(positions, next(batches))
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise UnavailableError(f"a process that loads samples died: {error}") from error
    finally:
        if hasattr(batches, "close"):
            batches.close()


class _Samples:
    """What torch calls a batch sampler: the sample numbers of each batch."""

    def __init__(self, order: Order, requests: Iterable[DataShard], ready: Ready | None) -> None:
        self._order, self._requests, self._ready = order, requests, ready

    def __iter__(self) -> Iterator[list[int]]:
        for positions in self._requests:
            if self._ready is not None:
                self._ready(positions)
            yield self._order.take(positions.start_index, positions.end_index).tolist()


class _End:
    """What the loading thread puts last: nothing more comes, or why."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def _ahead(source: Iterator[Any], depth: int) -> Iterator[Any]:
    """The items of `source`, up to `depth` of them made ahead by a thread that ends with this generator."""
    ready: queue.Queue[Any] = queue.Queue(depth)
    stop = threading.Event()

    def offer(item: Any) -> bool:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.05)
                return True
        return False

    def produce() -> None:
        error: BaseException | None = None
        try:
            for item in source:
                if not offer(item):
                    return
        except BaseException as caught:  # noqa: BLE001  it is raised again where the batch is asked for
            error = caught
        offer(_End(error))

    thread = threading.Thread(target=produce, name="shard-loader", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        stop.set()
        thread.join()
