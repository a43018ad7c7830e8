"""The rules behind the coordinator's decisions, as functions of plain numbers."""

from __future__ import annotations

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.errors import ConfigurationError


def allowed_losses(size: int, percentage: int) -> int:
    """How many workers a cluster of `size` may lose before the next committed step.

    The given share, rounded down to whole workers; but one loss is always allowed (it is what elastic
    training is for), unless the percentage is 0.
    """
    return max(1, size * percentage // 100) if percentage else 0


def worker_limit(config: ElasticTrainingConfig, desired: int | None) -> int | None:
    """The most members that the next generation may have; `None` for no limit."""
    limits = [limit for limit in (config.max_workers, desired) if limit is not None]
    return min(limits) if limits else None


def check_target(config: ElasticTrainingConfig, workers: int) -> int:
    """Return `workers` if the cluster may have that many; otherwise raise `ConfigurationError`."""
    most = config.max_workers
    if isinstance(workers, bool) or not isinstance(workers, int):
        raise ConfigurationError("workers", workers, "must be a whole number")
    if workers < config.min_workers or (most is not None and workers > most):
        upper = f" and max_workers ({most})" if most is not None else ""
        rule = (
            f"must lie between min_workers ({config.min_workers}){upper}"
            if upper
            else (f"must be at least min_workers ({config.min_workers})")
        )
        raise ConfigurationError("workers", workers, rule)
    return workers


def join_deadline(
    *, first_join: float, last_change: float, stability: float, patience: float
) -> float:
    """When waiting joiners are taken in: after `stability` seconds of quiet.

    An endless trickle of joins must not keep the first one waiting for ever, so its patience ends
    `patience` seconds after its own window would have.
    """
    return min(last_change + stability, first_join + stability + patience)


class Tolerance:
    """Counts losses and failed rescales since the last committed step, which forgives both."""

    def __init__(self, config: ElasticTrainingConfig) -> None:
        self._config = config
        self._size = 0
        self.losses = 0
        self.consecutive_failures = 0

    def expect(self, size: int) -> None:
        """Losses count against this size until a step is committed, unless one was set before."""
        self._size = self._size or size

    def forgive(self, size: int) -> None:
        """A step was committed by a cluster of this size."""
        self.losses = self.consecutive_failures = 0
        self._size = size

    def verdict(self, *, is_new_failure: bool) -> str | None:
        """Why the run must end, or `None`.

        `is_new_failure`: this one does not belong to a rescale whose barrier is still open.
        """
        size, percentage = max(self._size, 1), self._config.failure_tolerance_percentage
        if self.losses > allowed_losses(size, percentage):
            share = round(100 * self.losses / size)
            return (
                f"{self.losses} of {size} workers lost ({share} %) without a committed step between; "
                f"failure_tolerance_percentage is {percentage}"
            )
        if is_new_failure:
            self.consecutive_failures += 1
        most = self._config.max_consecutive_failures
        if self.consecutive_failures >= max(1, most):
            return (
                f"{self.consecutive_failures} failures in a row without a committed step between; "
                f"max_consecutive_failures is {most}"
            )
        return None
