"""Evaluation as part of a run: divided among the workers, with the same result on any number of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tensorforge.data.plan.shards import partition, quotas
from tensorforge.train.data.batch_loading import dataset_size, fetch
from tensorforge.train.group.generation_group import GenerationGroup
from tensorforge.train.loop.training_state import TrainingState
from tensorforge.validation import whole_number


class Evaluation:
    """Computes the mean of `function(batch)` over a dataset, every `every` steps.

    `function` returns numbers by name, each a mean over the batch's samples; it is called in evaluation
    mode and without gradients. The dataset is cut into `parts`; the additions happen part by part, so the
    result does not depend on the number of workers. `results` has the values by step, for the steps this
    worker took part in.
    """

    def __init__(
        self,
        function: Callable[[Any], Mapping[str, float | torch.Tensor]],
        dataset: Any,
        *,
        every: int,
        batch_size: int = 64,
        parts: int = 12,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        for field, value in (("every", every), ("batch_size", batch_size), ("parts", parts)):
            whole_number(field, value, least=1)
        self._function = function
        self._dataset = dataset
        self._size = dataset_size(dataset)
        self._every = every
        self._batch_size = batch_size
        self._parts = partition(self._size, parts)
        self._collate = collate_fn
        self.results: dict[int, dict[str, float]] = {}

    def is_due(self, state: TrainingState) -> bool:
        """Whether an evaluation follows the last committed step and was not done yet."""
        step = state.committed_step
        return step >= 0 and (step + 1) % self._every == 0 and state.evaluated_step < step

    def run(self, model: nn.Module, group: GenerationGroup | None) -> dict[str, float]:
        """Return the means over the dataset; raise `GroupAbortedError` if the cluster changes meanwhile."""
        rank, members = (0, 1) if group is None else (group.rank, group.world_size)
        counts = quotas(len(self._parts), members)
        first = sum(counts[:rank])
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                own = {index: self._sums(index) for index in range(first, first + counts[rank])}
        finally:
            model.train(was_training)
        answers = [own]
        if group is not None:
            gathered = group.gather_bytes(json.dumps(own).encode())
            answers = [{int(k): v for k, v in json.loads(a).items()} for a in gathered]
        return self._means({index: sums for answer in answers for index, sums in answer.items()})

    def _sums(self, index: int) -> dict[str, float]:
        part = self._parts[index]
        sums: dict[str, float] = {}
        for start in range(part.start_index, part.end_index, self._batch_size):
            stop = min(start + self._batch_size, part.end_index)
            batch = fetch(self._dataset, range(start, stop), self._collate)
            for name, value in self._function(batch).items():
                sums[name] = sums.get(name, 0.0) + float(value) * (stop - start)
        return sums

    def _means(self, by_part: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
        totals: dict[str, float] = {}
        for index in sorted(by_part):
            for name, value in by_part[index].items():
                totals[name] = totals.get(name, 0.0) + value
        return {name: value / self._size for name, value in totals.items()}
