"""Which spare processes exist. A spare has imported the heavy libraries and waits to become the next worker."""

from __future__ import annotations

from collections.abc import Sequence

EXITS_TOLERATED = 2
"""After more exits of spares than this, no spare is started any more."""


class Spares:
    """Keeps track of the spares. A spare has the name of the worker that it will become."""

    def __init__(self, wanted: int, modules: tuple[str, ...]) -> None:
        self.modules = modules
        self._wanted = wanted if modules else 0
        self._waiting: set[str] = set()
        self._exits = 0

    def to_start(self, names: Sequence[str]) -> list[str]:
        """The names among the next workers' for which a spare must be started now."""
        if self._exits > EXITS_TOLERATED:
            return []
        found = [name for name in names[: self._wanted] if name not in self._waiting]
        self._waiting.update(found)
        return found

    def take(self, name: str) -> bool:
        """Return whether a spare with this name waits; from now on it counts as a worker."""
        if name not in self._waiting:
            return False
        self._waiting.discard(name)
        return True

    def exited(self, name: str) -> bool:
        """A process exited; return whether it was a spare."""
        if name not in self._waiting:
            return False
        self._waiting.discard(name)
        self._exits += 1
        return True
