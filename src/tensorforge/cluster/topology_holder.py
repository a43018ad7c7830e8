"""A place where threads share the current topology."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tensorforge.cluster.topology import ClusterTopology
from tensorforge.errors import StaleGenerationError


class TopologyHolder:
    """Holds the current topology for several threads. The generation only grows."""

    def __init__(self, topology: ClusterTopology | None = None) -> None:
        self._lock = threading.Lock()
        self._topology = topology if topology is not None else ClusterTopology()

    @property
    def current(self) -> ClusterTopology:
        """The newest topology."""
        return self._topology

    def replace(self, topology: ClusterTopology) -> None:
        """Adopt a later topology; an older or equal generation is a `StaleGenerationError`."""
        with self._lock:
            self._adopt(topology)

    def update(self, change: Callable[[ClusterTopology], ClusterTopology]) -> ClusterTopology:
        """Apply `change` to the current topology, without another update in between."""
        with self._lock:
            self._adopt(change(self._topology))
            return self._topology

    def _adopt(self, topology: ClusterTopology) -> None:
        if topology.epoch <= self._topology.epoch:
            raise StaleGenerationError(
                f"generation {topology.epoch} does not follow {self._topology.epoch}"
            )
        self._topology = topology
