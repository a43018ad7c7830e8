"""The eleven options of an elastic run, and the enums that they use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tensorforge.errors import ConfigurationError
from tensorforge.validation import flag, member, whole_number


class AdaptationStrategy(Enum):
    """How batch size and learning rate change with the number of workers."""

    LINEAR = "linear"
    """Global batch and learning rate grow in proportion to the workers."""
    SQUARE_ROOT = "square_root"
    """The global batch grows in proportion to the workers, the learning rate with the square root."""
    NONE = "none"
    """Global batch and learning rate stay; the result has the same bits for any number of workers."""


class RedistributionType(Enum):
    """How data is divided again when the members change."""

    FULL_RESHUFFLE = "full_reshuffle"
    """Divide all remaining data again, in order of rank."""
    INCREMENTAL = "incremental"
    """Move as little data as restores the balance."""


class RescaleType(Enum):
    """How the number of workers changed."""

    SCALE_UP = "scale_up"
    SCALE_DOWN = "scale_down"
    REPLACE = "replace"
    """Standbys took the places of failed workers."""

    @classmethod
    def of(cls, old_size: int, new_size: int) -> RescaleType:
        """The type of a change from one number of workers to another."""
        if new_size == old_size:
            return cls.REPLACE
        return cls.SCALE_UP if new_size > old_size else cls.SCALE_DOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticTrainingConfig:
    """The options of an elastic run. A wrong value is a `ConfigurationError` at construction.

    `min_workers`: training pauses with fewer workers.
    `max_workers`: more workers wait as standbys; `None` for no limit.
    `rescale_timeout_ms`: how long a rescale, or a pause below the minimum, may last.
    `max_consecutive_failures`: so many failed rescales without a committed step between them end the run.
    `lr_adaptation_strategy`: see `AdaptationStrategy`.
    `redistribution_type`: see `RedistributionType`.
    `use_synchronous_rescaling`: a rescale waits until training code says that it is ready.
    `stability_window_ms`: joins wait until there was no change for this long, so that many make one rescale.
    `worker_heartbeat_timeout_ms`: a worker without a sign of life for this long has failed.
    `failure_tolerance_percentage`: losing a larger share of the workers before a committed step ends the run.
    `use_parallel_data_transfer`: move several shards at a time instead of one after the other.
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
