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
        self.update(lambda _: topology)

    def update(self, change: Callable[[ClusterTopology], ClusterTopology]) -> ClusterTopology:
        """Adopt what `change` makes of the current topology, without another update in between."""
        with self._lock:
            current, new = self._topology, change(self._topology)
            if new.epoch <= current.epoch:
                raise StaleGenerationError(
                    f"generation {new.epoch} does not follow {current.epoch}"
                )
            self._topology = new
            return new
