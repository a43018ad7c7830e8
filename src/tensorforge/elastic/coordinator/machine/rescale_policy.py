"""The rules of a rescale: how many members, when joiners are taken in, and how much a run may lose."""

from __future__ import annotations

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.errors import ConfigurationError
from tensorforge.validation import whole_number


def allowed_losses(size: int, percentage: int) -> int:
    """How many workers a cluster of `size` may lose before the next committed step.

    The share is rounded down to whole workers. One loss is always allowed, because surviving it is the purpose
    of elastic training; only a percentage of 0 allows none.
    """
    return max(1, size * percentage // 100) if percentage else 0


def worker_limit(config: ElasticTrainingConfig, desired: int | None) -> int | None:
    """The most members that the next generation may have; `None` for no limit."""
    limits = [limit for limit in (config.max_workers, desired) if limit is not None]
    return min(limits) if limits else None


def check_target(config: ElasticTrainingConfig, workers: int) -> int:
    """Return `workers` if the cluster may have that many; otherwise raise `ConfigurationError`."""
    least, most = config.min_workers, config.max_workers
    whole_number("workers", workers)
    if workers < least or (most is not None and workers > most):
        rule = f"must be at least min_workers ({least})"
        if most is not None:
            rule = f"must lie between min_workers ({least}) and max_workers ({most})"
        raise ConfigurationError("workers", workers, rule)
    return workers


def join_deadline(
    *, first_join: float, last_change: float, stability: float, patience: float
) -> float:
    """When waiting joiners are taken in: after `stability` seconds without a change.

    A stream of joins that never pauses must not make the first joiner wait for ever, so it waits at most
    `patience` seconds longer than its own stability window.
    """
    return min(last_change + stability, first_join + stability + patience)


class Tolerance:
    """Counts losses and failed rescales since the last committed step, and says when the run must end.

    A committed step sets both counters back to 0.
    """

    def __init__(self, config: ElasticTrainingConfig) -> None:
        self._config = config
        self._size = 0
        self.losses = 0
        self.consecutive_failures = 0

    def expect(self, size: int) -> None:
        """Compare losses with this size until a step is committed, unless a size was set before."""
        self._size = self._size or size

    def forgive(self, size: int) -> None:
        """A cluster of this size committed a step."""
        self.losses = self.consecutive_failures = 0
        self._size = size

    def verdict(self, *, is_new_failure: bool) -> str | None:
        """Why the run must end, or `None`.

        `is_new_failure`: this failure does not belong to a rescale whose barrier is still open.
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
