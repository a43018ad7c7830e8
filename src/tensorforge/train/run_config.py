"""What a run is told. Everything that decides its numbers is here, so equal settings give equal weights."""

from __future__ import annotations

from dataclasses import dataclass

from tensorforge.cluster.elastic_config import AdaptationStrategy
from tensorforge.data.plan.order import ShardLocalOrder, ShuffledOrder
from tensorforge.errors import ConfigurationError
from tensorforge.validation import finite_number, member, one_of, whole_number

_LARGEST = 2**62 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The settings of a run.

    `batch_size`: samples per optimizer step over all workers (at `base_workers` workers, where the strategy
    lets it grow with them).
    `shards`: into how many shards an epoch is cut; fixed for the run, at least the largest number of workers
    that should have work. Numbers with many divisors (12, 24, 48) divide evenly among many sizes.
    `seed`: of the order of samples and of every random stream.
    `strategy`: NONE keeps the batch and the learning rate, and the weights are the same on any number of
    workers; LINEAR and SQUARE_ROOT let the batch grow with the workers and the rate follow.
    `base_workers`: the number of workers that `batch_size` and the optimizer's rates were chosen for; `None`:
    that of the first generation.
    `accumulation`: into how many pieces a shard's part of a step is cut, to save memory.
    `clip_grad_norm`: the largest norm of the whole gradient.
    `schedule_every`: when the scheduler advances: `"step"` or `"epoch"`.
    `metrics`: the names that `step.log` may use besides the loss.
    `shuffle`: `"everywhere"` deals the samples anew to the shards in each epoch; `"within_shards"` keeps each
    shard's samples and changes their order, so that workers can hold them (see `LocalShards`).
    `block`: read this many neighbouring samples together when shuffling everywhere.
    `bucket_bytes`: how much of the gradient is sent at once, while the last backward pass goes on.
    """

    batch_size: int
    shards: int = 12
    seed: int = 0
    strategy: AdaptationStrategy = AdaptationStrategy.NONE
    base_workers: int | None = None
    accumulation: int = 1
    clip_grad_norm: float | None = None
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
        member("strategy", self.strategy, AdaptationStrategy)
        if self.clip_grad_norm is not None:
            finite_number("clip_grad_norm", self.clip_grad_norm, above=0)
        one_of("schedule_every", self.schedule_every, ("step", "epoch"))
        one_of("shuffle", self.shuffle, ("everywhere", "within_shards"))
        if self.shuffle == "within_shards" and self.block != 1:
            raise ConfigurationError("block", self.block, "has no meaning within shards")
        object.__setattr__(self, "metrics", tuple(self.metrics))
        if "loss" in self.metrics or len(set(self.metrics)) != len(self.metrics):
            raise ConfigurationError("metrics", self.metrics, "names must differ; loss is there")

    def order(self, samples: int, epoch: int) -> ShuffledOrder | ShardLocalOrder:
        """The order of an epoch's samples."""
        if self.shuffle == "within_shards":
            return ShardLocalOrder(samples, self.shards, self.seed, epoch)
        return ShuffledOrder(samples, self.seed, epoch, self.block)

    def global_batch(self, workers: int, base_workers: int) -> int:
        """Samples per step on so many workers."""
        if self.strategy is AdaptationStrategy.NONE:
            return self.batch_size
        return max(1, self.batch_size * workers // base_workers)

    def amounts(self, step: int, batch: int) -> list[int]:
        """How many of a step's `batch` samples each shard gives: as even as can be.

        The shards that give one more change from step to step, so that all end at about the same time.
        """
        share, rest = divmod(batch, self.shards)
        first = step * rest
        return [share + ((shard - first) % self.shards < rest) for shard in range(self.shards)]
