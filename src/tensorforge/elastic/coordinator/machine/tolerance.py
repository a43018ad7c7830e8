"""How much a run may lose before it ends itself."""

from __future__ import annotations

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.elastic.coordinator.machine.loss_policy import allowed_losses


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
