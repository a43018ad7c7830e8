"""The learning rate as a function of the number of workers."""

from __future__ import annotations

import math

from tensorforge.cluster.elastic_config import AdaptationStrategy
from tensorforge.errors import InvalidInputError


def adapt_learning_rate(
    base_lr: float, base_workers: int, workers: int, strategy: AdaptationStrategy
) -> float:
    """The rate for `workers` when `base_lr` was chosen for `base_workers`.

    The rate is always computed from the base, never from the last rate. So the same number of workers has
    exactly the same rate after any sequence of changes.
    """
    if not math.isfinite(base_lr) or base_lr < 0:
        raise InvalidInputError(f"base_lr = {base_lr!r}: must be a number, 0 or more")
    if base_workers < 1 or workers < 1:
        raise InvalidInputError(
            f"base_workers = {base_workers}, workers = {workers}: both must be at least 1"
        )
    if strategy is AdaptationStrategy.NONE or workers == base_workers:
        return base_lr
    ratio = workers / base_workers
    return base_lr * (ratio if strategy is AdaptationStrategy.LINEAR else math.sqrt(ratio))
