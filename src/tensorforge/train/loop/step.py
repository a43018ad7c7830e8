"""One optimizer step, as the training loop sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from tensorforge.data.plan.shards import DataShard
from tensorforge.errors import ConflictError, InvalidInputError
from tensorforge.train.data.batch_loading import BatchLoader, micro_batches
from tensorforge.train.data.random_streams import (
    restored_random_state,
    seed_everything,
    stream_seed,
)
from tensorforge.train.gradients.shard_gradients import Metric, StepGradients

if TYPE_CHECKING:
    from tensorforge.train.loop.engine import StepEngine


class Step:
    """One attempt at a step: the shards that this worker computes, their gradients, and the commit.

    `number` counts optimizer steps from 0, over all epochs. `samples` is the size of the batch over all
    workers. A step that was committed while the cluster changed comes once more, with no batches, so that the
    code after its commit runs. After a successful commit `metrics` holds the batch's loss and whatever was
    logged.
    """

    def __init__(
        self,
        engine: StepEngine,
        batches: BatchLoader,
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
        """Whether `commit` was called."""
        self.metrics: dict[str, float] = {}
        self._engine = engine
        self._batches = batches
        self._todo = list(compute)
        self._weight: float | None = None
        self._is_last_of_shard = False
        self._is_done_with_batch = True
        self._values: list[Metric] = []

    def batches(self) -> Iterator[Any]:
        """The micro-batches of the shards that this worker computes, one after another.

        Each shard has its own random stream, which depends on the seed, the epoch, the step and the shard
        alone. The iteration ends early if the cluster changes; finished shards are kept for the next attempt.
        """
        with restored_random_state(self._engine.device):
            while self._todo and not self._engine.session.interrupted:
                yield from self._shard_batches(self._todo[0])
                self._todo.pop(0)

    def _shard_batches(self, shard: int) -> Iterator[Any]:
        config, part = self._engine.config, self.taken[shard]
        names = 1 + len(config.metrics)
        if part.size == 0:
            self.gradients.add_empty_shard(shard, names)
            return
        self._values = [0.0] * names
        self.gradients.begin_shard(shard)
        seed_everything(stream_seed(config.seed, self.epoch, self.number, shard))
        for micro_batch in micro_batches(self.epoch, part, config.accumulation):
            size = micro_batch.stop - micro_batch.start
            self._weight, self._is_done_with_batch = size / self.samples, False
            self._is_last_of_shard = micro_batch.stop == part.end_index
            yield self._batches.load(micro_batch)
            if not self._is_done_with_batch:
                raise ConflictError(
                    f"step {self.number}: step.backward(loss) was not called for a batch"
                )
        self._weight = None
        self.gradients.end_shard(part.size / self.samples, self._values)

    def backward(self, loss: torch.Tensor, *, more: bool = False) -> None:
        """Compute the gradient of `loss`, the mean over the current batch's samples.

        For several losses of one batch pass `more=True` to all calls but the last. The run takes each
        parameter's `.grad` away afterwards; `before_update` sees the complete gradient.
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
        with self._collecting(is_last=self._is_last_of_shard and not more):
            torch.autograd.backward(loss * (weight * self._engine.loss_scale))
        self._is_done_with_batch = not more
        if not more and not self._is_last_of_shard:
            self.gradients.end_micro_batch()
        self._note(0, loss, weight)

    def _collecting(self, *, is_last: bool) -> AbstractContextManager[None]:
        """In the last backward pass of the step, send each gradient on as soon as autograd has computed it."""
        if is_last and len(self._todo) == 1:
            return self._engine.last_backward(self)
        return nullcontext()

    def log(self, **metrics: float | torch.Tensor) -> None:
        """Note values of the current batch, means over its samples; they are averaged over the step."""
        weight = self._current_weight("log")
        names = self._engine.config.metrics
        for name, value in metrics.items():
            if name not in names:
                raise InvalidInputError(
                    f"{name}: not one of this run's metrics {names}; name it in RunConfig.metrics"
                )
            self._note(1 + names.index(name), value, weight)

    def _note(self, number: int, value: float | torch.Tensor, weight: float) -> None:
        """Add a batch's value to the shard's metric. A value on a device stays there unread."""
        if isinstance(value, torch.Tensor):
            value = value.detach()
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            late = value.reshape(()).double() * weight
            self._values[number] = late + self._values[number]
        else:
            self._values[number] = self._values[number] + float(value) * weight

    def _current_weight(self, call: str) -> float:
        if self._weight is None:
            raise ConflictError(f"step.{call} belongs inside `for batch in step.batches()`")
        return self._weight

    def commit(self) -> bool:
        """Make the step part of the weights, on all workers or on none; return whether it is.

        `False` means that the cluster changed. Nothing is lost then: the same step comes again from
        `run.steps()`, with only the missing shards to compute.
        """
        if self.is_committed:
            if self.was_tried:
                raise ConflictError(f"step {self.number} is committed already")
            self.was_tried = True  # committed while the cluster changed; this tells the loop
            return True
        if self._todo and not self._engine.session.interrupted:
            raise ConflictError(
                f"step {self.number}: batches of {len(self._todo)} shards were not taken; "
                "go through all of step.batches() before step.commit()"
            )
        self.was_tried = True
        return self._engine.commit(self)
