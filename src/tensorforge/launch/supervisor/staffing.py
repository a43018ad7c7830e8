"""How many workers are wanted, which processes exist, and which to start or retire."""

from __future__ import annotations

from collections.abc import Iterator

from tensorforge.launch.supervisor.exit_reasons import ExitReasons
from tensorforge.launch.supervisor.instructions import (
    Instruction,
    Level,
    Say,
    SetTarget,
    StartWorker,
)
from tensorforge.launch.supervisor.restart_budget import RestartBudget, backoff
from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy
from tensorforge.launch.supervisor.tracked_worker import TrackedWorker
from tensorforge.wording import counted

SHRINK_TIMEOUT = 10.0
"""Seconds for the coordinator to release surplus workers, before the launcher retires the newest."""


class Staffing:
    """The workers of one run: local ones, started by this launcher, and remote ones, started elsewhere.

    `target` local workers are wanted, and the policy's standbys in addition. A failed worker is replaced
    after a backoff, or not at all once the restart budget is spent. The number that an operator sets includes
    the remote workers. Methods return the instructions to carry out now. After `close` no worker is started
    and no target is requested.
    """

    def __init__(self, policy: SupervisionPolicy, exit_reasons: ExitReasons) -> None:
        self.target = policy.workers
        self.workers: dict[str, TrackedWorker] = {}
        self.budget = RestartBudget(policy.max_restarts, policy.restart_window)
        self.host_budget = RestartBudget(policy.max_host_failures, policy.restart_window)
        self._ending_hosts: set[str] = set()
        self._policy = policy
        self._exit_reasons = exit_reasons
        self._count = 0
        self._names: set[str] = set()
        self._remote: set[str] = set()
        self._members: frozenset[str] = frozenset()
        self._restarts_at: list[float] = []
        self._unreplaced = 0
        self._failures_in_a_row = 0
        self._retire_surplus_at: float | None = None
        self._is_closed = False

    @property
    def reachable(self) -> int:
        """How many local workers can train if no other worker fails."""
        return min(self.target, self.target + self._policy.standbys - self._unreplaced)

    def next_names(self, count: int) -> list[str]:
        """The names of the next workers to start."""
        return [f"worker-{self._count + number}" for number in range(count)]

    def can_hang(self) -> list[str]:
        """The members that must make progress."""
        everybody = self.workers.values()
        return [w.name for w in everybody if w.can_hang and w.name in self._members]

    def deadlines(self) -> Iterator[float]:
        """The times at which `reconcile`, or a worker's `due`, may return instructions."""
        yield from self._restarts_at
        if self._retire_surplus_at is not None and not self._is_closed:
            yield self._retire_surplus_at
        for worker in self.workers.values():
            yield from worker.deadlines()

    def close(self) -> None:
        """The run is ending: start no more workers."""
        self._is_closed = True
        self._restarts_at.clear()
        self._exit_reasons.clear()

    # Workers that come and go

    def worker_joined(self, name: str) -> list[Instruction]:
        """The coordinator lists this worker."""
        if name in self.workers:
            self.workers[name].mark_joined()
        elif name not in self._names and name not in self._remote:
            self._remote.add(name)
            return [
                Say(f"{name} joins (started elsewhere)", Level.INFO, name),
                *self._request_target(),
            ]
        return []

    def generation_formed(self, members: tuple[str, ...]) -> None:
        """These are the members now."""
        self._members = frozenset(members)
        for name in members:
            if name in self.workers:
                self.workers[name].mark_joined()

    def worker_lost(self, name: str, reason: str, now: float) -> list[Instruction]:
        """The coordinator declared this worker lost."""
        if name in self.workers:
            self.workers[name].mark_lost(reason, now)
        return self._remote_left(name)

    def worker_released(
        self, name: str, reason: str, now: float, *, surplus: bool
    ) -> list[Instruction]:
        """The coordinator released this worker; `surplus`: the target already counts this departure."""
        worker = self.workers.get(name)
        if self._is_closed or not self._exit_reasons.is_news(name):
            return []
        done = self._remote_left(name, surplus=surplus)
        explained = self._exit_reasons.release(name)
        if worker is not None and not worker.leaving:
            done += worker.retire(now, tell=False)
        elif not explained:
            return done
        return done + self._departed(
            name, reason or f"{name} leaves as asked", counted_in_target=surplus
        )

    def worker_left(self, name: str) -> list[Instruction]:
        """Only the worker says that it left; with enough other workers, the target counts that already."""
        enough = self._surplus() + len(self._restarts_at) >= 0
        return self._departed(name, f"{name} left", counted_in_target=enough)

    def _departed(self, name: str, text: str, *, counted_in_target: bool) -> list[Instruction]:
        """Lower the target by one, unless it already counts this departure or the worker was a standby."""
        if counted_in_target or (self._policy.standbys and name not in self._members):
            return [Say(text, Level.INFO, name)]
        self.target = self._within_limits(self.target - 1)
        text += f"; {counted(self.target, 'worker')} wanted now"
        return [*self._request_target(), Say(text, Level.INFO, name)]

    def worker_placed(self, name: str, host: str, now: float) -> None:
        """The worker's process runs on this machine."""
        if name in self.workers:
            self.workers[name].mark_placed(host, now)

    def host_ends(self, name: str, seconds: float, reason: str, now: float) -> list[Instruction]:
        """The worker's machine is taken away in `seconds`: the worker leaves, none is started there."""
        worker = self.workers.get(name)
        if worker is None:
            return []
        if worker.host:
            self._ending_hosts.add(worker.host)
        done = worker.retire_before(now + seconds, now)
        why = f" ({reason})" if reason else ""
        text = f"{name} leaves: its machine is taken away in {seconds:.0f} s{why}"
        return [Say(text, Level.WARNING, name), *done] if done else []

    def worker_failed(self, now: float) -> bool:
        """A worker failed; plan its replacement, or return False if the restart budget is spent."""
        return self._plan_replacement(self.budget, now)

    def host_failed(self, now: float) -> bool:
        """A worker found no place or vanished; as `worker_failed`, with the budget for machines."""
        return self._plan_replacement(self.host_budget, now)

    def _plan_replacement(self, budget: RestartBudget, now: float) -> bool:
        self._failures_in_a_row += 1
        is_replaced = budget.spend(now)
        if is_replaced:
            self._restarts_at.append(now + backoff(self._failures_in_a_row))
        else:
            self._unreplaced += 1
        return is_replaced

    def step_committed(self) -> None:
        """Count failures in a row from zero again."""
        self._failures_in_a_row = 0

    # How many workers are wanted

    def operator_wants(self, workers: int, now: float) -> list[Instruction]:
        """An operator set the target, remote workers included; workers that were not replaced count again."""
        wanted, before = self._within_limits(workers - len(self._remote)), self.target
        if wanted == before:
            return []
        self.target, self._unreplaced = wanted, 0
        self._retire_surplus_at = now + SHRINK_TIMEOUT
        return [Say(f"{counted(wanted, 'local worker')} wanted instead of {before}", Level.INFO)]

    def reconcile(self, now: float) -> list[Instruction]:
        """Start missing workers; retire the surplus ones that the coordinator did not release in time."""
        missing = -self._surplus()
        del self._restarts_at[max(0, missing) :]
        self._restarts_at = [at for at in self._restarts_at if at > now]
        done = [self._start() for _ in range(missing - len(self._restarts_at))]
        if missing >= 0:
            self._retire_surplus_at = None
        elif self._retire_surplus_at is not None and now >= self._retire_surplus_at:
            self._retire_surplus_at = None
            for worker in self._live()[missing:]:
                done += worker.retire(now)
        return done

    def _start(self) -> Instruction:
        (name,) = self.next_names(1)
        self._count += 1
        self._names.add(name)
        self.workers[name] = TrackedWorker(name, self._policy)
        return StartWorker(name, frozenset(self._ending_hosts))

    def _remote_left(self, name: str, *, surplus: bool = False) -> list[Instruction]:
        if name not in self._remote:
            return []
        self._remote.discard(name)
        gone = Say(f"{name} is gone", Level.INFO, name)
        if surplus:
            # The target of all workers stays as it is: a local worker takes the place of the remote one.
            self.target = self._within_limits(self.target + 1)
            return [gone]
        return [gone, *self._request_target()]

    def _request_target(self) -> list[Instruction]:
        """The coordinator's target: the local target plus the remote workers."""
        if self._is_closed:
            return []
        return [SetTarget(self._policy.clamp(self.target + len(self._remote)))]

    def _within_limits(self, local: int) -> int:
        """The nearest number of local workers that the limits allow beside the remote ones."""
        return max(0, self._policy.clamp(local + len(self._remote)) - len(self._remote))

    def _surplus(self) -> int:
        """How many more workers than wanted there are; exits that await an explanation count as workers."""
        wanted = max(0, self.target + self._policy.standbys - self._unreplaced)
        return len(self._live()) + len(self._exit_reasons) - wanted

    def _live(self) -> list[TrackedWorker]:
        return [worker for worker in self.workers.values() if not worker.leaving]
