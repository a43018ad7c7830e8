"""Micro-batches: which samples one is made of, and how they are loaded and collated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from tensorforge.data.plan.order import ShardLocalOrder, ShuffledOrder
from tensorforge.data.plan.shards import DataShard, quotas
from tensorforge.errors import InvalidInputError
from tensorforge.train.data.random_streams import (
    restored_random_state,
    seed_host,
    stream_seed,
)
from tensorforge.train.run_config import RunConfig

Collate = Callable[[list[Any]], Any]

_REQUIREMENT = (
    "Elastic training gives each sample to exactly one step, so it needs a map-style dataset: "
    "one with __len__ and __getitem__"
)


def dataset_size(dataset: Any) -> int:
    """How many samples a map-style dataset has. An iterable dataset is an error that says what is needed."""
    try:
        size = len(dataset)
    except TypeError:
        raise InvalidInputError(f"dataset: it has no length. {_REQUIREMENT}") from None
    if isinstance(dataset, IterableDataset):
        raise InvalidInputError(f"dataset: it can only be iterated over. {_REQUIREMENT}")
    if size < 1:
        raise InvalidInputError("dataset: it is empty")
    return size


def fetch(dataset: Any, samples: Iterable[int], collate: Collate | None) -> Any:
    """The samples with these numbers, collated."""
    if _is_plain(dataset, collate):
        numbers = torch.tensor([int(number) for number in samples])
        return [tensor[numbers] for tensor in dataset.tensors]
    wanted = [int(number) for number in samples]
    if hasattr(dataset, "__getitems__"):
        items = dataset.__getitems__(wanted)
    else:
        items = [dataset[number] for number in wanted]
    return (collate or default_collate)(items)


def _is_plain(dataset: Any, collate: Collate | None) -> bool:
    return collate is None and type(dataset) is TensorDataset


class MicroBatch(NamedTuple):
    """The samples of one micro-batch: positions `[start, stop)` in the order of an epoch."""

    epoch: int
    start: int
    stop: int


def micro_batches(epoch: int, part: DataShard, accumulation: int) -> Iterator[MicroBatch]:
    """Cut a shard's part of a step into at most `accumulation` micro-batches."""
    start = part.start_index
    if part.size:
        for size in quotas(part.size, min(accumulation, part.size)):
            yield MicroBatch(epoch, start, start + size)
            start += size


class BatchLoader(Protocol):
    """Loads micro-batches, in this process or ahead of time in others."""

    def load(self, micro_batch: MicroBatch) -> Any:
        """Return the collated samples."""
        ...

    def close(self) -> None:
        """Give up whatever the loader uses. Doing it again changes nothing."""
        ...


class BatchSource:
    """Loads each micro-batch in this process, when it is asked for.

    The random stream of the dataset and the collate function is seeded per micro-batch, from the seed and the
    positions alone, and torch computes in one thread. So a micro-batch is the same in whatever process it is
    loaded, and however often.
    """

    def __init__(self, dataset: Any, config: RunConfig, collate: Collate | None) -> None:
        self._dataset = dataset
        self._size = dataset_size(dataset)
        self._config = config
        self._collate = collate
        self._order: ShuffledOrder | ShardLocalOrder | None = None

    def load(self, micro_batch: MicroBatch) -> Any:
        """Return the collated samples."""
        epoch, start, stop = micro_batch
        if self._order is None or self._order.epoch != epoch:
            self._order = self._config.order(self._size, epoch)
        samples = self._order.take(start, stop)
        if _is_plain(self._dataset, self._collate):
            return fetch(self._dataset, samples, None)  # nothing is random in it
        with restored_random_state(), _one_thread():
            seed_host(stream_seed(self._config.seed, epoch, start, purpose="data"))
            return fetch(self._dataset, samples, self._collate)

    def close(self) -> None:
        """Do nothing: there is nothing to give up."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Give torch one thread, as a loading process has, because sums depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
