"""One worker's process as the supervisor tracks it: what it was asked to do, and by when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tensorforge.launch.supervisor.hangs import DUMP_TIMEOUT
from tensorforge.launch.supervisor.instructions import (
    DumpStacks,
    Instruction,
    Kill,
    Level,
    Retire,
    Say,
    StopTraining,
)
from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy


@dataclass(slots=True)
class TrackedWorker:
    """A worker's process from the request to start it to its exit.

    `placed_at`: when its process was started; `None` while the worker waits for a place. `host`: where.
    `joined`: the coordinator has listed the worker at least once. `leaving`: its exit is expected and not a
    failure. `failure_cause`: why the worker was, or will be, killed as failed. Methods return the
    instructions to carry out now.
    """

    name: str
    policy: SupervisionPolicy
    placed_at: float | None = None
    host: str = ""
    joined: bool = False
    leaving: bool = False
    failure_cause: str | None = None
    _lost: tuple[float, str] | None = None
    _retire_at: float | None = None
    _kill_at: float | None = None
    _is_killed: bool = False

    @property
    def can_hang(self) -> bool:
        """Whether this worker must make progress, so that it can hang."""
        return (
            self.joined and not self.leaving and self._lost is None and self.failure_cause is None
        )

    @property
    def is_killed(self) -> bool:
        """Whether the launcher killed this worker."""
        return self._is_killed

    def mark_placed(self, host: str, now: float) -> None:
        """The worker's process runs on this machine; its time to join begins."""
        self.placed_at, self.host = now, host

    def mark_joined(self) -> None:
        """The coordinator lists the worker, for the first time or again."""
        self.joined, self._lost = True, None

    def mark_lost(self, reason: str, now: float) -> None:
        """The coordinator declared the worker lost; it is killed unless it rejoins within `lost_timeout`."""
        if not self.leaving and self.failure_cause is None and self._lost is None:
            self._lost = (now, reason)

    def retire(self, now: float, *, tell: bool = True) -> list[Instruction]:
        """Make the worker leave, and kill it after `stop_timeout`; `tell=False`: it knows already."""
        if self.leaving:
            return []
        self.leaving = True
        self._kill_at = now + self.policy.stop_timeout
        return [Retire(self.name)] if tell else []

    def retire_before(self, deadline: float, now: float) -> list[Instruction]:
        """Make the worker leave before its machine is taken away at `deadline`."""
        done = self.retire(now)
        if done and self._kill_at is not None:
            self._kill_at = max(now, min(self._kill_at, deadline))
        return done

    def stop(self, now: float) -> list[Instruction]:
        """Stop training with the other workers; a worker that is no member is asked to leave instead."""
        if self.failure_cause is not None:
            return self.kill()
        if self.leaving or not self.joined:
            return self.retire(now)
        self.await_exit(now)
        return [StopTraining(self.name)]

    def await_exit(self, now: float) -> None:
        """Expect the worker to exit by itself; ask it to leave at half of `stop_timeout`, then kill it."""
        self.leaving = True
        self._retire_at = now + self.policy.stop_timeout / 2
        self._kill_at = now + self.policy.stop_timeout

    def kill_as_failed(self, cause: str, detail: str = "") -> list[Instruction]:
        """Kill the worker and show the cause; `detail`: lines to show below it."""
        if self.failure_cause is not None:
            return []
        self.failure_cause = cause
        notice = Say(f"{self.name} {cause}; it is killed", Level.WARNING, self.name, detail)
        return [notice, *self.kill()]

    def stack_arrived(self, text: str) -> list[Instruction]:
        """The stack dump has arrived; if the kill was waiting only for it, kill now."""
        if self.failure_cause is None or self._kill_at is None:
            return []
        notice = f"{self.name} {self.failure_cause}; it is killed"
        return [Say(notice, Level.WARNING, self.name, text), *self.kill()]

    def kill(self) -> list[Instruction]:
        """Kill the worker now."""
        self._is_killed = True
        self._kill_at = self._retire_at = self._lost = None
        return [Kill(self.name)]

    def deadlines(self) -> Iterator[float]:
        """The times at which `due` may return instructions."""
        if self._retire_at is not None:
            yield self._retire_at
        if self._kill_at is not None:
            yield self._kill_at
        elif self._lost is not None:
            yield self._lost[0] + self.policy.lost_timeout
        elif (limit := self._join_limit) is not None:
            yield limit

    @property
    def _join_limit(self) -> float | None:
        if self.joined or self.leaving or self._is_killed or self.placed_at is None:
            return None
        timeout = self.policy.join_timeout
        return None if timeout is None else self.placed_at + timeout

    def due(self, now: float) -> list[Instruction]:
        """The instructions whose time has come."""
        done: list[Instruction] = []
        if self._retire_at is not None and now >= self._retire_at:
            self._retire_at = None
            done.append(Retire(self.name))
        if self._kill_at is not None:
            return done + (self._kill_overdue() if now >= self._kill_at else [])
        if self._lost is not None:
            since, reason = self._lost
            late = now >= since + self.policy.lost_timeout
            return (
                self.kill_as_failed(f"was declared lost by the coordinator ({reason})")
                if late
                else []
            )
        limit = self._join_limit
        if limit is not None and now >= limit:
            self.failure_cause = f"did not join within {self.policy.join_timeout:g} s"
            self._kill_at = now + DUMP_TIMEOUT
            return [DumpStacks(self.name)]
        return done

    def _kill_overdue(self) -> list[Instruction]:
        notice = Say(f"{self.name} did not exit in time and is killed", Level.WARNING, self.name)
        return [*([notice] if self.failure_cause is None else []), *self.kill()]
