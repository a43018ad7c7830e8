"""How an elastic run behaves: eleven options, each checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tensorforge.errors import ConfigurationError
from tensorforge.validation import flag, member, whole_number


class AdaptationStrategy(Enum):
    """What happens to batch and learning rate when the number of workers changes."""

    LINEAR = "linear"
    """The global batch grows with the workers, the learning rate in proportion."""
    SQUARE_ROOT = "square_root"
    """The global batch grows with the workers, the learning rate with its square root."""
    NONE = "none"
    """Global batch and learning rate stay: the result is the same bits for any number of workers."""


class RedistributionType(Enum):
    """How data finds its new owners when the members change."""

    FULL_RESHUFFLE = "full_reshuffle"
    """Deal all remaining data anew, in order of rank."""
    INCREMENTAL = "incremental"
    """Move the least that restores balance."""


class RescaleType(Enum):
    """Which way the cluster changed."""

    SCALE_UP = "scale_up"
    SCALE_DOWN = "scale_down"
    REPLACE = "replace"
    """Standbys took the places of failed workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticTrainingConfig:
    """The options of an elastic run. A wrong value is a `ConfigurationError` at construction.

    `min_workers`: training pauses below it.
    `max_workers`: joiners beyond it wait as standbys; `None` for no limit.
    `rescale_timeout_ms`: how long a rescale, or a pause below the minimum, may last.
    `max_consecutive_failures`: that many rescales without a committed step between end the run.
    `lr_adaptation_strategy`: see `AdaptationStrategy`.
    `redistribution_type`: see `RedistributionType`.
    `use_synchronous_rescaling`: training waits for its own code to say that it is ready.
    `stability_window_ms`: joins wait for this much quiet, so that a storm of joins is one rescale.
    `worker_heartbeat_timeout_ms`: silence for this long is a failure.
    `failure_tolerance_percentage`: losing more of the cluster than this at once ends the run.
    `use_parallel_data_transfer`: move several shards at a time, or one after the other.
    """

    min_workers: int = 1
    max_workers: int | None = None
    rescale_timeout_ms: int = 30_000
    max_consecutive_failures: int = 3
    lr_adaptation_strategy: AdaptationStrategy = AdaptationStrategy.LINEAR
    redistribution_type: RedistributionType = RedistributionType.FULL_RESHUFFLE
    use_synchronous_rescaling: bool = True
    stability_window_ms: int = 30_000
    worker_heartbeat_timeout_ms: int = 10_000
    failure_tolerance_percentage: int = 20
    use_parallel_data_transfer: bool = True

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise `ConfigurationError` for the first option that breaks its rule."""
        whole_number("min_workers", self.min_workers, least=1)
        if self.max_workers is not None:
            whole_number("max_workers", self.max_workers, least=1)
            if self.max_workers < self.min_workers:
                rule = f"must be at least min_workers ({self.min_workers}), or None for no limit"
                raise ConfigurationError("max_workers", self.max_workers, rule)
        for field in ("rescale_timeout_ms", "max_consecutive_failures", "stability_window_ms"):
            whole_number(field, getattr(self, field), least=0)
        whole_number("worker_heartbeat_timeout_ms", self.worker_heartbeat_timeout_ms, least=1)
        percentage = self.failure_tolerance_percentage
        whole_number("failure_tolerance_percentage", percentage, least=0, most=100)
        member("lr_adaptation_strategy", self.lr_adaptation_strategy, AdaptationStrategy)
        member("redistribution_type", self.redistribution_type, RedistributionType)
        flag("use_synchronous_rescaling", self.use_synchronous_rescaling)
        flag("use_parallel_data_transfer", self.use_parallel_data_transfer)
