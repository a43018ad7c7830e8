"""Which spare processes there are: workers to be, that have imported what takes long and wait."""

from __future__ import annotations

from collections.abc import Sequence

DEATHS_TOLERATED = 2
"""A script whose imports cannot be done ahead is started cold from then on."""


class Spares:
    """The books of the spares. A spare bears the name of the worker that it will be."""

    def __init__(self, wanted: int, modules: tuple[str, ...]) -> None:
        self.modules = modules
        self._wanted = wanted if modules else 0
        self._waiting: set[str] = set()
        self._deaths = 0

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those of the next workers' names that have no process yet; it is to be started now."""
        if self._deaths > DEATHS_TOLERATED:
            return []
        found = [name for name in names[: self._wanted] if name not in self._waiting]
        self._waiting.update(found)
        return found

    def take(self, name: str) -> bool:
        """Whether this worker's process waits already; from now on it is a worker."""
        if name not in self._waiting:
            return False
        self._waiting.discard(name)
        return True

    def ended(self, name: str) -> bool:
        """A process ended; whether it was a spare."""
        if name not in self._waiting:
            return False
        self._waiting.discard(name)
        self._deaths += 1
        return True
