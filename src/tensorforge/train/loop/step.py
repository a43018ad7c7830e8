"""One optimizer step, as the training loop sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tensorforge.data.plan.shards import DataShard
from tensorforge.errors import ConflictError, InvalidInputError
from tensorforge.train.data.batch_loading import Piece, pieces
from tensorforge.train.data.random_streams import (
    restored_random_state,
    seed_everything,
    stream_seed,
)
from tensorforge.train.gradients.shard_gradients import EntryReady, StepGradients

if TYPE_CHECKING:
    from tensorforge.train.run_config import RunConfig


class StepHost(Protocol):
    """What a step needs of its run."""

    config: RunConfig

    @property
    def interrupted(self) -> bool:
        """Whether more work on this attempt is pointless."""
        ...

    def load(self, piece: Piece) -> Any:
        """The batch at these positions of the epoch's order."""
        ...

    def begin_exchange(self, step: Step) -> EntryReady | None:
        """The last backward pass begins; what to tell of the sums that are complete, if anything."""
        ...

    def commit(self, step: Step) -> bool:
        """Reduce, vote and apply; whether the step is part of the weights now."""
        ...


class Step:
    """One attempt at a step: the shards that live here, their gradients, and the commit.

    `number` counts optimizer steps from 0, over all epochs; `samples` is the size of the whole batch on all
    workers. After a successful commit `metrics` holds the batch's loss and whatever was logged.
    """

    def __init__(
        self,
        host: StepHost,
        *,
        number: int,
        epoch: int,
        taken: tuple[DataShard, ...],
        compute: tuple[int, ...],
        gradients: StepGradients,
    ) -> None:
        self.number = number
        self.epoch = epoch
        self.taken = taken
        self.samples = sum(part.size for part in taken)
        self.gradients = gradients
        self.is_committed = False
        self.was_tried = False
        self.metrics: dict[str, float] = {}
        self._host = host
        self._todo = list(compute)
        self._weight: float | None = None
        self._is_last_piece = False
        self._is_done_with_batch = True
        self._values: list[float] = []

    def batches(self) -> Iterator[Any]:
        """The micro-batches of the shards that are to be computed here, one after another.

        Each shard has its own random stream, which depends on the seed, the epoch, the step and the shard
        alone. Ends early if the cluster changes; what was computed is kept.
        """
        with restored_random_state():
            while self._todo and not self._host.interrupted:
                yield from self._shard_batches(self._todo[0])
                self._todo.pop(0)

    def _shard_batches(self, shard: int) -> Iterator[Any]:
        config, part = self._host.config, self.taken[shard]
        names = 1 + len(config.metrics)
        if part.size == 0:
            self.gradients.put_nothing(shard, names)
            return
        self._values = [0.0] * names
        self.gradients.begin_shard(shard)
        seed_everything(stream_seed(config.seed, self.epoch, self.number, shard))
        for piece in pieces(self.epoch, part, config.accumulation):
            size = piece.stop - piece.start
            self._weight, self._is_done_with_batch = size / self.samples, False
            self._is_last_piece = piece.stop == part.end_index
            yield self._host.load(piece)
            if not self._is_done_with_batch:
                raise ConflictError(
                    f"step {self.number}: step.backward(loss) was not called for a batch"
                )
        self._weight = None
        self.gradients.end_shard(part.size / self.samples, self._values)

    def backward(self, loss: torch.Tensor, *, more: bool = False) -> None:
        """Compute the gradient of `loss`, the mean over the current batch's samples.

        For several losses of one batch pass `more=True` to all but the last. Afterwards the gradients
        are in the run's hands: `before_update` sees them complete.
        """
        weight = self._current_weight("backward")
        if loss.numel() != 1:
            raise InvalidInputError(
                f"loss: a mean over the batch has one element, not shape {tuple(loss.shape)}"
            )
        if self._is_done_with_batch:
            raise ConflictError(
                f"step {self.number}: step.backward was called again for a batch; "
                "pass more=True to all calls but the last"
            )
        with self._taking_gradients(is_last=self._is_last_piece and not more):
            torch.autograd.backward(loss * weight)
        self._is_done_with_batch = not more
        self._values[0] += float(loss.detach()) * weight

    def _taking_gradients(self, *, is_last: bool) -> AbstractContextManager[None]:
        ready = None
        if is_last and len(self._todo) == 1:
            ready = self._host.begin_exchange(self)
        return nullcontext() if ready is None else self.gradients.finishing(ready)

    def log(self, **metrics: float | torch.Tensor) -> None:
        """Note values of the current batch, means over its samples; they are averaged over the step."""
        weight = self._current_weight("log")
        names = self._host.config.metrics
        for name, value in metrics.items():
            if name not in names:
                raise InvalidInputError(
                    f"{name}: not one of this run's metrics {names}; name it in RunConfig.metrics"
                )
            self._values[1 + names.index(name)] += float(value) * weight

    def _current_weight(self, call: str) -> float:
        if self._weight is None:
            raise ConflictError(f"step.{call} belongs inside `for batch in step.batches()`")
        return self._weight

    @property
    def is_computed(self) -> bool:
        """Whether every shard that was to be computed here is."""
        return not self._todo

    def commit(self) -> bool:
        """Make the step part of the weights, on all workers or on none.

        Returns whether it was. If the cluster changed meanwhile it was not; nothing is lost, and the same step
        comes again from `run.steps()`, with only the missing shards to compute.
        """
        if self.is_committed:
            raise ConflictError(f"step {self.number} is committed already")
        if not self.is_computed and not self._host.interrupted:
            raise ConflictError(
                f"step {self.number}: batches of {len(self._todo)} shards were not taken; "
                "go through all of step.batches() before step.commit()"
            )
        self.was_tried = True
        return self._host.commit(self)
