"""Noticing that nothing moves any more, and finding out who is to blame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tensorforge.launch.supervisor.stacks import is_waiting_for_peers

DUMP_TIMEOUT = 3.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who hangs in its own code, and who could only be found waiting for others."""

    hung: tuple[str, ...]
    waiting: tuple[str, ...]
    in_a_row: int
    """How many verdicts without progress between found nobody to blame, this one included."""
    stacks: Mapping[str, str] = field(default_factory=dict)


class HangWatch:
    """Watches for `timeout` seconds without progress (`None`: never), then collects stacks.

    In synchronous training all members stop when one does. The stacks tell them apart: whoever has done
    its part waits in the step's commit; whoever does not is the one that hangs.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._moved_at: float | None = None
        self._asked_at: float | None = None
        self._expected: set[str] = set()
        self._stacks: dict[str, str] = {}
        self._blameless = 0

    def moved(self, now: float, *, forward: bool = True) -> None:
        """Something happened that rules out a hang up to now; `forward`: a step was committed."""
        self._moved_at = now
        self._asked_at = None
        if forward:
            self._blameless = 0

    def dumped(self, worker: str, text: str) -> None:
        """A worker answered with its stack."""
        if self._asked_at is not None:
            self._stacks[worker] = text

    def deadline(self) -> float | None:
        """When to look again."""
        if self._timeout is None or self._moved_at is None:
            return None
        if self._asked_at is None:
            return self._moved_at + self._timeout
        return self._asked_at + DUMP_TIMEOUT

    def overdue(self, workers: Iterable[str], now: float) -> tuple[str, ...]:
        """The workers to ask for their stacks, once, when nothing has moved for too long."""
        if self._asked_at is not None or (limit := self.deadline()) is None or now < limit:
            return ()
        self._expected, self._stacks = set(workers), {}
        self._asked_at = now if self._expected else None
        self._moved_at = now
        return tuple(sorted(self._expected))

    def verdict(self, now: float) -> Verdict | None:
        """The judgement, once all stacks are there or took too long; `None` before that."""
        if self._asked_at is None:
            return None
        if not self._expected <= set(self._stacks) and now < self._asked_at + DUMP_TIMEOUT:
            return None
        waiting = {
            worker
            for worker in self._expected
            if is_waiting_for_peers(self._stacks.get(worker, ""))
        }
        hung = self._expected - waiting
        self._blameless = 0 if hung else self._blameless + 1
        self._asked_at, self._moved_at = None, now
        return Verdict(tuple(sorted(hung)), tuple(sorted(waiting)), self._blameless, self._stacks)
