"""Counters and times of the service, in Prometheus' language.

With several worker processes, each keeps its figures in files of a folder that all of them share, and whichever
is asked adds up everybody's. The server's process names the folder in the environment before it starts them,
since Prometheus' client decides when it is imported where its figures live.
"""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from tensorforge.registry.service.http_server import SHARED_FOLDER


class Metrics:
    """How many requests came, and how long they took."""

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

    def expose(self, *, waiting: int) -> bytes:
        """Everything of all workers as text; so many messages wait for their webhooks."""
        registry = self._own
        if self._shared:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # the library has no types here
        return generate_latest(registry) + _WAITING % waiting


_WAITING = b"""\
# HELP tensorforge_registry_webhooks_waiting Messages to webhooks that are not delivered yet.
# TYPE tensorforge_registry_webhooks_waiting gauge
tensorforge_registry_webhooks_waiting %d
"""
