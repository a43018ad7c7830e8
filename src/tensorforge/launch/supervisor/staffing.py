"""How many workers there are to be, who they are, and who is started or let go to make it so."""

from __future__ import annotations

from collections.abc import Iterator

from tensorforge.launch.supervisor.exit_reasons import Departures
from tensorforge.launch.supervisor.instructions import (
    Instruction,
    Level,
    Say,
    SetTarget,
    StartWorker,
)
from tensorforge.launch.supervisor.restart_budget import RestartBudget, backoff
from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy
from tensorforge.launch.supervisor.tracked_worker import Hand
from tensorforge.wording import counted

SHRINK_TIMEOUT = 10.0
"""Seconds for the coordinator to let surplus workers go; it knows best which ones."""


class Staffing:
    """The workers of one run: those that are started here, and guests that joined from elsewhere.

    `target` local workers are wanted, and the policy's standbys beside them. One that failed is owed until
    its backoff is over, or forfeited if the restart budget is spent. Guests come on top: of what operators
    ask for, the guests are a part. Methods return what has to be done now; once it is closed, nobody is
    started or asked for any more.
    """

    def __init__(self, policy: SupervisionPolicy, departures: Departures) -> None:
        self.target = policy.workers
        self.workers: dict[str, Hand] = {}
        self.budget = RestartBudget(policy.max_restarts, policy.restart_window)
        self._policy = policy
        self._departures = departures
        self._count = 0
        self._names: set[str] = set()
        self._guests: set[str] = set()
        self._members: frozenset[str] = frozenset()
        self._owed: list[float] = []
        self._forfeited = 0
        self._deaths_in_a_row = 0
        self._shrink_at: float | None = None
        self._is_closed = False

    @property
    def reachable(self) -> int:
        """How many can train if nobody else fails."""
        return min(self.target, self.target + self._policy.standbys - self._forfeited)

    def next_names(self, count: int) -> list[str]:
        """What the next workers will be called."""
        return [f"worker-{self._count + number}" for number in range(count)]

    def who_can_hang(self) -> list[str]:
        """The members of whom progress is expected."""
        everybody = self.workers.values()
        return [w.name for w in everybody if w.can_hang and w.name in self._members]

    def deadlines(self) -> Iterator[float]:
        """When `reconcile`, or a worker's own `check`, may have something to do."""
        yield from self._owed
        if self._shrink_at is not None and not self._is_closed:
            yield self._shrink_at
        for worker in self.workers.values():
            yield from worker.deadlines()

    def close(self) -> None:
        """The run comes to its end."""
        self._is_closed = True
        self._owed.clear()
        self._departures.clear()

    # Who comes and who goes

    def joined(self, name: str) -> list[Instruction]:
        """The coordinator knows this worker."""
        if name in self.workers:
            self.workers[name].came_back()
        elif name not in self._names and name not in self._guests:
            self._guests.add(name)
            return [Say(f"{name} joins from elsewhere", Level.INFO, name), *self._ask_for_all()]
        return []

    def formed(self, members: tuple[str, ...]) -> None:
        """These train now."""
        self._members = frozenset(members)
        for name in members:
            if name in self.workers:
                self.workers[name].came_back()

    def lost(self, name: str, reason: str, now: float) -> list[Instruction]:
        """The coordinator gave this worker up."""
        if name in self.workers:
            self.workers[name].was_lost(reason, now)
        return self._guest_went(name)

    def released(self, name: str, reason: str, now: float, *, surplus: bool) -> list[Instruction]:
        """The coordinator let this worker go; `surplus`: the number that is wanted knows of it."""
        worker = self.workers.get(name)
        if self._is_closed or not self._departures.is_news(name):
            return []
        done = self._guest_went(name, surplus=surplus)
        explained = self._departures.release(name)
        if worker is not None and not worker.leaving:
            done += worker.retire(now, tell=False)
        elif not explained:
            return done
        return done + self._went(name, reason or f"{name} leaves as asked", known=surplus)

    def left(self, name: str) -> list[Instruction]:
        """It left, says the worker alone; if fewer were asked for since, that may be why."""
        enough = self._surplus() + len(self._owed) >= 0
        return self._went(name, f"{name} left", known=enough)

    def _went(self, name: str, told: str, *, known: bool) -> list[Instruction]:
        """One fewer is wanted, unless the number is known to count it, or it was no more than a standby."""
        if known or (self._policy.standbys and name not in self._members):
            return [Say(told, Level.INFO, name)]
        self.target = self._within_limits(self.target - 1)
        told += f"; {counted(self.target, 'worker')} wanted now"
        return [*self._ask_for_all(), Say(told, Level.INFO, name)]

    def failed(self, now: float) -> bool:
        """A worker failed; whether it is replaced, or else forfeited."""
        self._deaths_in_a_row += 1
        is_replaced = self.budget.spend(now)
        if is_replaced:
            self._owed.append(now + backoff(self._deaths_in_a_row))
        else:
            self._forfeited += 1
        return is_replaced

    def committed(self) -> None:
        """A step was committed: the next failure is the first in a row."""
        self._deaths_in_a_row = 0

    # How many there are to be

    def asked_for(self, workers: int, now: float) -> list[Instruction]:
        """Someone asked for another number of workers, guests included; that renews what was forfeited."""
        wanted, before = self._within_limits(workers - len(self._guests)), self.target
        if wanted == before:
            return []
        self.target, self._forfeited = wanted, 0
        self._shrink_at = now + SHRINK_TIMEOUT
        return [Say(f"{counted(wanted, 'local worker')} wanted instead of {before}", Level.INFO)]

    def reconcile(self, now: float) -> list[Instruction]:
        """Start whoever is missing; retire whoever is too many and was not let go by the coordinator."""
        missing = -self._surplus()
        del self._owed[max(0, missing) :]
        self._owed = [at for at in self._owed if at > now]
        done = [self._start(now) for _ in range(missing - len(self._owed))]
        if missing >= 0:
            self._shrink_at = None
        elif self._shrink_at is not None and now >= self._shrink_at:
            self._shrink_at = None
            for worker in self._live()[missing:]:
                done += worker.retire(now)
        return done

    def _start(self, now: float) -> Instruction:
        (name,) = self.next_names(1)
        self._count += 1
        self._names.add(name)
        self.workers[name] = Hand(name, self._policy, now)
        return StartWorker(name)

    def _guest_went(self, name: str, *, surplus: bool = False) -> list[Instruction]:
        if name not in self._guests:
            return []
        self._guests.discard(name)
        gone = Say(f"{name} is gone", Level.INFO, name)
        if surplus:
            # Of the number that is wanted, it was counted as a part that is not started here.
            self.target = self._within_limits(self.target + 1)
            return [gone]
        return [gone, *self._ask_for_all()]

    def _ask_for_all(self) -> list[Instruction]:
        """Those who joined from elsewhere come on top of the workers that are started here."""
        if self._is_closed:
            return []
        return [SetTarget(self._policy.clamp(self.target + len(self._guests)))]

    def _within_limits(self, local: int) -> int:
        """The nearest number of local workers that the limits allow beside the guests."""
        return max(0, self._policy.clamp(local + len(self._guests)) - len(self._guests))

    def _surplus(self) -> int:
        """How many more run, or may yet be explained, than are wanted."""
        wanted = max(0, self.target + self._policy.standbys - self._forfeited)
        return len(self._live()) + len(self._departures) - wanted

    def _live(self) -> list[Hand]:
        return [worker for worker in self.workers.values() if not worker.leaving]
