"""The learning rate as a function of the number of workers."""

from __future__ import annotations

import math

from tensorforge.cluster.elastic_config import AdaptationStrategy
from tensorforge.validation import finite_number, whole_number


def adapt_learning_rate(
    base_lr: float, base_workers: int, workers: int, strategy: AdaptationStrategy
) -> float:
    """The rate for `workers` when `base_lr` was chosen for `base_workers`.

    The rate is always computed from the base, never from the last rate. So the same number of workers has
    exactly the same rate after any sequence of changes.
    """
    finite_number("base_lr", base_lr, least=0)
    whole_number("base_workers", base_workers, least=1)
    whole_number("workers", workers, least=1)
    if strategy is AdaptationStrategy.NONE or workers == base_workers:
        return base_lr
    ratio = workers / base_workers
    return base_lr * (ratio if strategy is AdaptationStrategy.LINEAR else math.sqrt(ratio))
