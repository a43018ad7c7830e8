"""The rules behind the coordinator's decisions, as functions of plain numbers."""

from __future__ import annotations

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.errors import ConfigurationError
from tensorforge.validation import whole_number


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
    whole_number("workers", workers)
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
