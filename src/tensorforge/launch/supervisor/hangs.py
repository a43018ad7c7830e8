"""Noticing that training makes no progress, and finding the workers that hang."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tensorforge.launch.supervisor.stacks import is_waiting_for_peers

DUMP_TIMEOUT = 3.0
"""Seconds that a worker has to answer with its stack."""


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """What the collected stacks show. `hung`: the workers that do not wait for others, or did not answer."""

    hung: tuple[str, ...]
    in_a_row: int
    """How many verdicts found no hung worker since a step was committed, including this one."""
    stacks: Mapping[str, str] = field(default_factory=dict)


class HangDetector:
    """Asks for stacks after `timeout` seconds without progress (`None`: never), and judges them.

    In synchronous training all members stop when one does. The stacks tell them apart: a member that has done
    its part waits in the step's commit; any other one hangs.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._progress_at: float | None = None
        self._asked_at: float | None = None
        self._expected: set[str] = set()
        self._stacks: dict[str, str] = {}
        self._unresolved = 0

    def progressed(self, now: float, *, committed: bool = True) -> None:
        """Something happened that excludes a hang until now; `committed`: a step was committed."""
        self._progress_at = now
        self._asked_at = None
        if committed:
            self._unresolved = 0

    def stack_arrived(self, worker: str, text: str) -> None:
        """A worker answered with its stack."""
        if self._asked_at is not None:
            self._stacks[worker] = text

    def deadline(self) -> float | None:
        """When `workers_to_ask` or `verdict` must be called again."""
        if self._timeout is None or self._progress_at is None:
            return None
        if self._asked_at is None:
            return self._progress_at + self._timeout
        return self._asked_at + DUMP_TIMEOUT

    def workers_to_ask(self, workers: Iterable[str], now: float) -> tuple[str, ...]:
        """The workers to ask for their stacks, returned once when there was no progress for too long."""
        if self._asked_at is not None or (limit := self.deadline()) is None or now < limit:
            return ()
        self._expected, self._stacks = set(workers), {}
        self._asked_at = now if self._expected else None
        self._progress_at = now
        return tuple(sorted(self._expected))

    def verdict(self, now: float) -> HangVerdict | None:
        """The verdict once all stacks have arrived or their time is over; `None` before."""
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
        self._unresolved = 0 if hung else self._unresolved + 1
        self._asked_at, self._progress_at = None, now
        return HangVerdict(tuple(sorted(hung)), self._unresolved, self._stacks)
