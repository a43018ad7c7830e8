"""Samples by number, as a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import TensorDataset, default_collate

from tensorforge.errors import InvalidInputError


def dataset_size(dataset: Any) -> int:
    """How many samples a map-style dataset has; an iterable one is an error that says what to do."""
    try:
        size = len(dataset)
    except TypeError:
        raise InvalidInputError(
            "dataset: it has no length. Elastic training gives each sample to exactly one step, so it needs "
            "a map-style dataset: one with __len__ and __getitem__"
        ) from None
    if size < 1:
        raise InvalidInputError("dataset: it is empty")
    return size


def fetch(dataset: Any, samples: Iterable[int], collate: Callable[[list[Any]], Any] | None) -> Any:
    """The samples with these numbers, collated."""
    if collate is None and isinstance(dataset, TensorDataset):
        numbers = torch.tensor([int(number) for number in samples])
        return [tensor[numbers] for tensor in dataset.tensors]
    wanted = [int(number) for number in samples]
    if hasattr(dataset, "__getitems__"):
        items = dataset.__getitems__(wanted)
    else:
        items = [dataset[number] for number in wanted]
    return (collate or default_collate)(items)
