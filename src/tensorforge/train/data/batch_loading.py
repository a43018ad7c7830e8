"""Samples by number, as a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from tensorforge.data.plan.order import ShardLocalOrder, ShuffledOrder
from tensorforge.data.plan.shards import DataShard, quotas
from tensorforge.errors import InvalidInputError
from tensorforge.train.data.random_streams import (
    restored_random_state,
    seed_everything,
    stream_seed,
)
from tensorforge.train.run_config import RunConfig

Collate = Callable[[list[Any]], Any]

_WHAT_IS_NEEDED = (
    "Elastic training gives each sample to exactly one step, so it needs a map-style dataset: "
    "one with __len__ and __getitem__"
)


def dataset_size(dataset: Any) -> int:
    """How many samples a map-style dataset has; an iterable one is an error that says what to do."""
    try:
        size = len(dataset)
    except TypeError:
        raise InvalidInputError(f"dataset: it has no length. {_WHAT_IS_NEEDED}") from None
    if isinstance(dataset, IterableDataset):
        raise InvalidInputError(f"dataset: it can only be iterated over. {_WHAT_IS_NEEDED}")
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


class Piece(NamedTuple):
    """The positions `[start, stop)` of an epoch's order: what one micro-batch is made of."""

    epoch: int
    start: int
    stop: int


def pieces(epoch: int, part: DataShard, accumulation: int) -> Iterator[Piece]:
    """A shard's part of a step, cut into its micro-batches."""
    start = part.start_index
    if part.size:
        for size in quotas(part.size, min(accumulation, part.size)):
            yield Piece(epoch, start, start + size)
            start += size


class BatchSource:
    """Loads a piece when it is asked for.

    What is random in the dataset or the collate function has a stream per piece. It depends on the seed and
    the positions alone, and torch computes in one thread, so it does not matter where a piece is loaded, or how
    often.
    """

    def __init__(self, dataset: Any, config: RunConfig, collate: Collate | None) -> None:
        self._dataset = dataset
        self._size = dataset_size(dataset)
        self._config = config
        self._collate = collate
        self._order: ShuffledOrder | ShardLocalOrder | None = None

    def load(self, piece: Piece) -> Any:
        """The batch."""
        if self._order is None or self._order.epoch != piece.epoch:
            self._order = self._config.order(self._size, piece.epoch)
        samples = self._order.take(piece.start, piece.stop)
        if _is_plain(self._dataset, self._collate):
            return fetch(self._dataset, samples, None)  # nothing is random in it
        with restored_random_state(), _one_thread():
            seed_everything(
                stream_seed(self._config.seed, piece.epoch, piece.start, purpose="data")
            )
            return fetch(self._dataset, samples, self._collate)

    def close(self) -> None:
        """Nothing to do: it holds nothing."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """As many as a loading process has: sums depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
