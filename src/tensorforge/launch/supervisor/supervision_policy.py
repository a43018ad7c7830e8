"""The settings of the supervisor."""

from __future__ import annotations

from dataclasses import dataclass

from tensorforge.errors import ConfigurationError
from tensorforge.validation import whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionPolicy:
    """How a launched run is supervised. A wrong value raises `ConfigurationError`.

    `workers`: the first target; `tensorforge scale` changes it between `min_workers` and `max_workers`.
    `standbys`: how many more workers are connected, to take the place of one that fails.
    `max_restarts` within `restart_window` seconds: how many failed workers are replaced.
    `max_host_failures` within the same time: how many workers are replaced that could not be placed or that
    vanished with their machine. These spend no restarts, because the script did nothing wrong.
    `hang_timeout`: seconds without progress after which hung workers are searched for; `None`: never.
    `join_timeout`: seconds within which a worker must join once its process runs; `None`: no limit.
    `stop_timeout`: seconds after which workers that have not exited after a graceful stop are killed.
    `lost_timeout`: seconds within which a worker that the coordinator declared lost must rejoin.
    """

    workers: int = 1
    min_workers: int = 1
    max_workers: int | None = None
    standbys: int = 0
    max_restarts: int = 10
    max_host_failures: int = 20
    restart_window: float = 3600.0
    hang_timeout: float | None = 300.0
    join_timeout: float | None = 300.0
    stop_timeout: float = 30.0
    lost_timeout: float = 10.0

    def __post_init__(self) -> None:
        self._at_least("min_workers", 1)
        self._at_least("workers", self.min_workers, " (min_workers)")
        if self.max_workers is not None:
            self._at_least("max_workers", self.workers, " (workers)")
        self._at_least("standbys", 0)
        self._at_least("max_restarts", 0)
        self._at_least("max_host_failures", 0)
        for name in (
            "restart_window",
            "hang_timeout",
            "join_timeout",
            "stop_timeout",
            "lost_timeout",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(name, value, "must be more than 0 seconds")

    def _at_least(self, name: str, least: int, why: str = "") -> None:
        value = getattr(self, name)
        if whole_number(name, value) < least:
            raise ConfigurationError(name, value, f"must be at least {least}{why}")

    def clamp(self, workers: int) -> int:
        """The nearest number of workers that the limits allow."""
        most = workers if self.max_workers is None else min(workers, self.max_workers)
        return max(self.min_workers, most)
