"""The settings of a run. All that decides its numbers is here, so equal settings give equal weights."""

from __future__ import annotations

from dataclasses import dataclass

from tensorforge.cluster.elastic_config import AdaptationStrategy
from tensorforge.data.plan.order import ShardLocalOrder, ShuffledOrder
from tensorforge.errors import ConfigurationError
from tensorforge.validation import finite_number, member, one_of, whole_number

_LARGEST = 2**62 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaling:
    """How the loss is scaled. The fields and their defaults are those of `torch.amp.GradScaler`.

    `initial`: the scale of the first step. `growth`: the factor after `growth_interval` applied steps in a row.
    `backoff`: the factor after a step whose gradient was not finite.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        finite_number("initial", self.initial, above=0)
        finite_number("growth", self.growth, above=0)
        finite_number("backoff", self.backoff, above=0)
        whole_number("growth_interval", self.growth_interval, least=1)
        if self.growth < 1:
            raise ConfigurationError("growth", self.growth, "must be 1 or more")
        if self.backoff >= 1:
            raise ConfigurationError("backoff", self.backoff, "must be less than 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The settings of a run.

    `batch_size`: samples per optimizer step over all workers. With a strategy that lets the batch grow with
    the workers, it is the batch size on `base_workers` workers. `shards`: the number of shards into which
    an epoch is cut, fixed for the run. Workers beyond this number have no work. Numbers with many divisors
    (12, 24, 48) divide evenly among many numbers of workers. `seed`: seeds the order of samples and every
    random stream. `strategy`: NONE keeps the batch and the learning rate, and the weights are the same on
    any number of workers. LINEAR and SQUARE_ROOT let the batch grow with the workers and adapt the learning
    rate. `None` takes the strategy of the cluster's configuration; without a cluster that is NONE.
    `base_workers`: the number of workers for which `batch_size` and the optimizer's rates were
    chosen; `None` means the number of workers in the first generation. `accumulation`: the number of
    micro-batches into which a shard's part of a step is cut, to save memory. `clip_grad_norm`: the norm to
    which a larger gradient of a step is scaled down. `loss_scaling`: how the loss is scaled in training with
    half precision; a step whose gradient is not finite then updates nothing, on any worker.
    `schedule_every`: whether the scheduler advances after each `"step"` or each `"epoch"`. `metrics`: the
    names that `step.log` may use besides the loss.
    `shuffle`: `"everywhere"` assigns the samples to shards anew in each epoch; `"within_shards"` keeps each
    shard's samples and changes their order, so that workers can store them (see `LocalShards`). `block`:
    the number of neighbouring samples that stay together when shuffling everywhere. `bucket_bytes`: how
    much of the gradient is sent at once during the last backward pass.
    """

    batch_size: int
    shards: int = 12
    seed: int = 0
    strategy: AdaptationStrategy | None = None
    base_workers: int | None = None
    accumulation: int = 1
    clip_grad_norm: float | None = None
    loss_scaling: LossScaling | None = None
    schedule_every: str = "step"
    metrics: tuple[str, ...] = ()
    shuffle: str = "everywhere"
    block: int = 1
    bucket_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        for field in ("batch_size", "shards", "accumulation", "block", "bucket_bytes"):
            whole_number(field, getattr(self, field), least=1, most=_LARGEST)
        whole_number("seed", self.seed, least=0, most=_LARGEST)
        if self.base_workers is not None:
            whole_number("base_workers", self.base_workers, least=1, most=_LARGEST)
        if self.strategy is not None:
            member("strategy", self.strategy, AdaptationStrategy)
        if self.clip_grad_norm is not None:
            finite_number("clip_grad_norm", self.clip_grad_norm, above=0)
        if not isinstance(self.loss_scaling, LossScaling | None):
            raise ConfigurationError(
                "loss_scaling", self.loss_scaling, "must be a LossScaling or None"
            )
        one_of("schedule_every", self.schedule_every, ("step", "epoch"))
        one_of("shuffle", self.shuffle, ("everywhere", "within_shards"))
        if self.shuffle == "within_shards" and self.block != 1:
            raise ConfigurationError("block", self.block, "must be 1 when shuffling within shards")
        object.__setattr__(self, "metrics", tuple(self.metrics))
        if "loss" in self.metrics or len(set(self.metrics)) != len(self.metrics):
            raise ConfigurationError("metrics", self.metrics, "must be different names, not loss")

    def order(self, samples: int, epoch: int) -> ShuffledOrder | ShardLocalOrder:
        """The order of an epoch's samples."""
        if self.shuffle == "within_shards":
            return ShardLocalOrder(samples, self.shards, self.seed, epoch)
        return ShuffledOrder(samples, self.seed, epoch, self.block)

    def global_batch(self, workers: int, base_workers: int) -> int:
        """Samples per step on so many workers."""
        if self.strategy in (None, AdaptationStrategy.NONE):
            return self.batch_size
        return max(1, self.batch_size * workers // base_workers)

    def amounts(self, step: int, batch: int) -> list[int]:
        """How many of a step's `batch` samples each shard gives; the numbers differ by at most one.

        Which shards give one more changes from step to step, so that all shards end at about the same step.
        """
        share, rest = divmod(batch, self.shards)
        first = step * rest
        return [share + ((shard - first) % self.shards < rest) for shard in range(self.shards)]
