"""The state that is the same on all members. It changes in two ways only: by a commit and by a restore."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from tensorforge.cluster.elastic_config import AdaptationStrategy
from tensorforge.data.plan.ledger import Ledger
from tensorforge.data.plan.shards import DataShard
from tensorforge.elastic.learning_rate import adapt_learning_rate
from tensorforge.errors import ConflictError, EncodingError, IntegrityError, InvalidInputError
from tensorforge.train.gradients.flat_layout import Entries
from tensorforge.train.gradients.shard_gradients import StepGradients
from tensorforge.train.loop.flat_state import FlatState, flatten, unflatten
from tensorforge.train.loop.loss_scaling import LossScale
from tensorforge.train.run_config import RunConfig
from tensorforge.wording import counted

_FORMAT = 1


class Stateful(Protocol):
    """Anything with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state as plain data and tensors."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Replace the current state."""
        ...


@dataclass(slots=True)
class PreparedStep:
    """A step whose gradient is complete on this member, with all that is needed to commit it.

    `taken` is what each shard gives to the step, `total` the summed gradient, `used` says for each parameter
    whether any shard used it. After the commit `is_skipped` says whether loss scaling skipped the update.
    """

    step: int
    epoch: int
    workers: int
    taken: tuple[DataShard, ...]
    gradients: StepGradients
    total: Entries
    used: list[bool]
    metrics: dict[str, float]
    is_skipped: bool = False


class TrainingState:
    """Model, optimizer, scheduler, ledger, and the user's own objects that have a state."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        size: int,
        config: RunConfig,
        *,
        scheduler: Stateful | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        before_update: Callable[[], None] | None = None,
        after_update: Callable[[], None] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.ledger = Ledger(size, config.shards)
        self.base_workers = config.base_workers
        self._strategy = config.strategy
        self.adopt_strategy(AdaptationStrategy.NONE)
        self.evaluated_step = -1
        self.epochs_proven = 0
        self.loss_scale = LossScale(config.loss_scaling)
        self.skipped_steps = 0
        """How many committed steps updated nothing, because their gradient was not finite."""
        self.skipped_samples = 0
        self.applied_rate = 0.0
        """The learning rate of the optimizer's first group in the last step that was committed here."""
        self._scheduler = scheduler
        self._stateful = dict(stateful or {})
        self._before_update = before_update
        self._after_update = after_update
        self._is_updating = False
        optimizer.register_step_pre_hook(self._refuse_foreign_step)

    def adopt_strategy(self, strategy: AdaptationStrategy) -> None:
        """Adapt to the number of workers by `strategy`, unless the run's own settings name one."""
        chosen = self._strategy or strategy
        self.config = replace(self.config, strategy=chosen)
        # Unused with NONE; pinned to 1 so that digests agree.
        is_fixed = chosen is AdaptationStrategy.NONE
        self.base_workers = 1 if is_fixed else self.config.base_workers

    @property
    def committed_step(self) -> int:
        """The last committed step; -1 before the first."""
        return self.ledger.committed_step

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to."""
        return self.ledger.epoch

    def next_batch(self, workers: int) -> tuple[DataShard, ...]:
        """What each shard gives to the next step on so many workers; some shards may give nothing."""
        return self._batch_after(self.ledger, workers)

    def batches_ahead(self, workers: int) -> Iterator[tuple[int, tuple[DataShard, ...]]]:
        """The epoch and the batch of the next step and of all later ones, as long as nothing changes."""
        ledger = self.ledger
        while True:
            taken = self._batch_after(ledger, workers)
            yield ledger.epoch, taken
            ledger = _committed(ledger, ledger.committed_step + 1, taken)
            if ledger.is_complete:
                ledger = ledger.next_epoch()

    def _batch_after(self, ledger: Ledger, workers: int) -> tuple[DataShard, ...]:
        batch = self.config.global_batch(workers, self.base_workers or workers)
        amounts = self.config.amounts(ledger.committed_step + 1, batch)
        taken = tuple(
            ledger.batch(shard, amount) if amount else _empty(ledger, shard)
            for shard, amount in enumerate(amounts)
        )
        if any(part.size for part in taken):
            return taken
        # The last samples of the epoch are in shards that were to give none: take one from each that has any.
        return tuple(ledger.batch(shard, 1) for shard in range(self.config.shards))

    def _adapted(self, rate: float, workers: int) -> float:
        base = self.base_workers or workers
        strategy = self.config.strategy or AdaptationStrategy.NONE
        return adapt_learning_rate(rate, base, workers, strategy)

    def commit(self, prepared: PreparedStep) -> None:
        """Apply a prepared step: weights, buffers, learning rates and ledger change together.

        A step whose gradient is not finite under loss scaling consumes its samples and updates nothing but the
        buffers and the scale.
        """
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.applied_rate = self._adapted(rate, prepared.workers)
        is_finite = self.loss_scale.unscale(prepared.gradients.parameter_sums(prepared.total))
        prepared.gradients.install(prepared.total, prepared.used)
        ledger = self._ledger_after(prepared)
        if is_finite:
            self._update(prepared.workers, is_new_epoch=ledger.epoch != self.epoch)
        else:
            self.skipped_steps += 1
            self.skipped_samples += sum(part.size for part in prepared.taken)
        prepared.is_skipped = not is_finite
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_scale.advance(applied=is_finite)
        self.ledger = ledger
        if is_finite and self._after_update is not None:
            self._after_update()

    def _update(self, workers: int, *, is_new_epoch: bool) -> None:
        """Clip the gradient, update the weights and advance the scheduler."""
        if self.config.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_grad_norm)
        if self._before_update is not None:
            self._before_update()
        with self._rates_for(workers), self._updating():
            self.optimizer.step()
        if self._scheduler is not None and (self.config.schedule_every == "step" or is_new_epoch):
            self._scheduler.step()  # type: ignore[attr-defined]  # every scheduler has it

    @contextmanager
    def _updating(self) -> Iterator[None]:
        self._is_updating = True
        try:
            yield
        finally:
            self._is_updating = False

    def _refuse_foreign_step(self, *_: object) -> None:
        """Raise if the script itself calls `optimizer.step()`, for example through a GradScaler."""
        if not self._is_updating:
            raise ConflictError(
                "optimizer.step() was called outside of the commit. step.commit() updates the weights, on "
                "all workers or on none: remove the call. For loss scaling instead of a GradScaler use "
                "RunConfig(loss_scaling=LossScaling())"
            )

    def _ledger_after(self, prepared: PreparedStep) -> Ledger:
        """The ledger with the step's samples consumed; of the next epoch if they were the last ones."""
        ledger = _committed(self.ledger, prepared.step, prepared.taken)
        if ledger.is_complete:
            ledger.prove()
            self.epochs_proven += 1
            ledger = ledger.next_epoch()
        return ledger

    @contextmanager
    def _rates_for(self, workers: int) -> Iterator[None]:
        """Adapt the optimizer's rates to so many workers inside; schedulers see the base rates only."""
        if self.config.strategy is AdaptationStrategy.NONE:
            yield
            return
        groups = self.optimizer.param_groups
        base = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, base, strict=True):
                group["lr"] = self._adapted(float(rate), workers)
            yield
        finally:
            for group, rate in zip(groups, base, strict=True):
                group["lr"] = rate

    def capture(self) -> FlatState:
        """The state as plain data and tensors. The tensors are the live ones, not copies."""
        return flatten(
            {
                "format": _FORMAT,
                "model": {
                    "parameters": dict(self.model.named_parameters()),
                    "buffers": dict(self.model.named_buffers()),
                },
                "optimizer": self.optimizer.state_dict(),
                **self.bookkeeping(),
            }
        )

    def bookkeeping(self) -> dict[str, Any]:
        """Everything but the model and the optimizer."""
        return {
            "scheduler": self._scheduler.state_dict() if self._scheduler is not None else None,
            "stateful": {name: part.state_dict() for name, part in self._stateful.items()},
            "progress": {
                "ledger": self.ledger.pack(),
                "seed": self.config.seed,
                "base_workers": self.base_workers,
                "evaluated_step": self.evaluated_step,
                "epochs_proven": self.epochs_proven,
            },
            **self._scaling_state(),
        }

    def _scaling_state(self) -> dict[str, Any]:
        """Empty without loss scaling, so that states without it are those of earlier versions."""
        if self.config.loss_scaling is None:
            return {}
        return {
            "loss_scaling": {
                **self.loss_scale.state_dict(),
                "skipped_steps": self.skipped_steps,
                "skipped_samples": self.skipped_samples,
            }
        }

    def restore(self, flat: FlatState) -> None:
        """Replace the state by one that `capture` returned, here or on another worker."""
        state = unflatten(flat)
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise EncodingError("not the state of a run, or a state of another version")
        self._restore_model(state["model"])
        self.restore_optimizer(state["optimizer"])
        self.restore_bookkeeping(state)

    def _restore_model(self, model: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        ours: dict[str, dict[str, torch.Tensor]] = {
            "parameters": dict(self.model.named_parameters()),
            "buffers": dict(self.model.named_buffers()),
        }
        for kind, tensors in ours.items():
            if set(tensors) != set(model[kind]):
                odd = sorted(set(tensors) ^ set(model[kind]))
                raise InvalidInputError(
                    f"the model has other {kind} than the received state: {odd}"
                )
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.copy_(model[kind][name])

    def restore_optimizer(self, state: Mapping[str, Any]) -> None:
        """Replace the optimizer's state, bit for bit."""
        self.optimizer.load_state_dict(dict(state))
        # load_state_dict casts tensors to the parameter's dtype; those of another dtype must keep their bits.
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, values in state["state"].items():
            slot = self.optimizer.state[parameters[index]]
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(slot.get(key), torch.Tensor):
                    slot[key] = value.detach().clone().to(slot[key].device)

    def restore_bookkeeping(self, state: Mapping[str, Any]) -> None:
        """Replace everything but the model and the optimizer."""
        progress = state["progress"]
        ledger = Ledger.unpack(progress["ledger"])
        if (ledger.size, ledger.shards) != (self.ledger.size, self.config.shards):
            raise InvalidInputError(
                f"the state is of a run with {ledger.size} samples in {ledger.shards} shards; "
                f"this one has {self.ledger.size} in {self.config.shards}"
            )
        if progress["seed"] != self.config.seed:
            raise InvalidInputError(
                f"the state is of a run with seed {progress['seed']}, this one has {self.config.seed}"
            )
        if set(state["stateful"]) != set(self._stateful):
            odd = sorted(set(state["stateful"]) ^ set(self._stateful))
            raise InvalidInputError(
                f"stateful: {odd} are in this run or in the state, but not in both"
            )
        if (state["scheduler"] is None) != (self._scheduler is None):
            here, there = ("no", "one") if self._scheduler is None else ("a", "none")
            raise InvalidInputError(f"this run has {here} scheduler but the state has {there}")
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        for name, part in self._stateful.items():
            part.load_state_dict(state["stateful"][name])
        self.ledger = ledger
        self.base_workers = progress["base_workers"]
        self.evaluated_step = progress["evaluated_step"]
        self.epochs_proven = progress["epochs_proven"]
        if "loss_scaling" in state and self.config.loss_scaling is not None:
            self.loss_scale.load_state_dict(state["loss_scaling"])
            self.skipped_steps = state["loss_scaling"]["skipped_steps"]
            self.skipped_samples = state["loss_scaling"]["skipped_samples"]

    def require_exactly_once(self) -> str:
        """Prove that each sample was in exactly one committed step; return the proof in words."""
        proof = self.ledger.prove()
        if self.epochs_proven != self.ledger.epoch:
            raise IntegrityError(
                f"{self.epochs_proven} epochs were proven complete, but {self.ledger.epoch} are over"
            )
        done = f"{counted(self.epochs_proven, 'epoch')} complete; " if self.epochs_proven else ""
        skipped = ""
        if self.skipped_steps:
            steps = counted(self.skipped_steps, "step")
            skipped = (
                f"; {counted(self.skipped_samples, 'sample')} in {steps} skipped by loss scaling"
            )
        return f"{done}{proof}{skipped}"


def _committed(ledger: Ledger, step: int, taken: tuple[DataShard, ...]) -> Ledger:
    return ledger.commit(step, [part for part in taken if part.size])


def _empty(ledger: Ledger, shard: int) -> DataShard:
    cursor = ledger.cursor(shard)
    return DataShard(shard, cursor, cursor)
