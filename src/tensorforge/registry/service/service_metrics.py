"""Counters and times of the service, in Prometheus' format.

With several worker processes, each writes its figures into files of one shared folder, and the process that is
asked adds them up. `http_server` names the folder in the environment before it starts the workers, since
Prometheus' client decides at import time where its figures are stored.
"""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from tensorforge.registry.service.http_server import SHARED_FOLDER


class Metrics:
    """The number of requests, and how long they took."""

    def __init__(self) -> None:
        self._shared = SHARED_FOLDER in os.environ
        self._own = CollectorRegistry()
        self._requests = Counter(
            "tensorforge_registry_requests",
            "Requests by operation and status.",
            ["operation", "status"],
            registry=self._own,
        )
        self._seconds = Histogram(
            "tensorforge_registry_request_seconds",
            "Time to answer, by operation.",
            ["operation"],
            registry=self._own,
        )
        self._of: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def observe(self, operation: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        found = self._of.get((operation, status))
        if found is None:
            found = self._requests.labels(operation, status), self._seconds.labels(operation)
            self._of[operation, status] = found
        requests, times = found
        requests.inc()
        times.observe(seconds)

    def expose(self, *, pending: int) -> bytes:
        """The figures of all workers as text, with the number of pending webhook messages."""
        registry = self._own
        if self._shared:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # the library has no types here
        return generate_latest(registry) + _PENDING % pending


_PENDING = b"""\
# HELP tensorforge_registry_webhooks_waiting Messages to webhooks that are not delivered yet.
# TYPE tensorforge_registry_webhooks_waiting gauge
tensorforge_registry_webhooks_waiting %d
"""
