"""One worker's process in the supervisor's books: what was asked of it, and how long it may take."""

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
class Hand:
    """A worker's process from its start to its exit.

    `joined`: the coordinator has known it. `leaving`: its exit is expected and no failure. `doom`: why it
    is, or will be, killed as a failure. Methods return what has to be done now.
    """

    name: str
    policy: SupervisionPolicy
    started_at: float
    joined: bool = False
    leaving: bool = False
    doom: str | None = None
    _lost: tuple[float, str] | None = None
    _nudge_at: float | None = None
    _kill_at: float | None = None
    _is_killed: bool = False

    @property
    def can_hang(self) -> bool:
        """Whether progress is expected of it."""
        return self.joined and not self.leaving and self._lost is None and self.doom is None

    @property
    def is_killed(self) -> bool:
        """Whether it was the launcher that ended it."""
        return self._is_killed

    def came_back(self) -> None:
        """The coordinator knows it (again)."""
        self.joined, self._lost = True, None

    def was_lost(self, reason: str, now: float) -> None:
        """The coordinator gave it up; it has some time to come back."""
        if not self.leaving and self.doom is None and self._lost is None:
            self._lost = (now, reason)

    def retire(self, now: float, *, tell: bool = True) -> list[Instruction]:
        """It shall leave; with `tell=False` somebody else has told it already."""
        if self.leaving:
            return []
        self.leaving = True
        self._kill_at = now + self.policy.stop_timeout
        return [Retire(self.name)] if tell else []

    def stop(self, now: float) -> list[Instruction]:
        """Training shall stop together; who cannot take part in that is asked to leave half-way."""
        if self.doom is not None:
            return self.kill()
        if self.leaving or not self.joined:
            return self.retire(now)
        self.await_end(now)
        return [StopTraining(self.name)]

    def await_end(self, now: float) -> None:
        """It ends by itself, but not for ever; half-way it is asked to leave."""
        self.leaving = True
        self._nudge_at = now + self.policy.stop_timeout / 2
        self._kill_at = now + self.policy.stop_timeout

    def fail(self, cause: str, detail: str = "") -> list[Instruction]:
        """Kill it for this cause; `detail` shows more of it."""
        if self.doom is not None:
            return []
        self.doom = cause
        told = Say(f"{self.name} {cause}; it is killed", Level.WARNING, self.name, detail)
        return [told, *self.kill()]

    def dumped(self, text: str) -> list[Instruction]:
        """Its stacks are there; if only they were waited for, that was it."""
        if self.doom is None or self._kill_at is None:
            return []
        told = f"{self.name} {self.doom}; it is killed"
        return [Say(told, Level.WARNING, self.name, text), *self.kill()]

    def kill(self) -> list[Instruction]:
        """End it now."""
        self._is_killed = True
        self._kill_at = self._nudge_at = self._lost = None
        return [Kill(self.name)]

    def deadlines(self) -> Iterator[float]:
        """When `check` may have something to do."""
        if self._nudge_at is not None:
            yield self._nudge_at
        if self._kill_at is not None:
            yield self._kill_at
        elif self._lost is not None:
            yield self._lost[0] + self.policy.lost_timeout
        elif self._must_join and self.policy.join_timeout is not None:
            yield self.started_at + self.policy.join_timeout

    @property
    def _must_join(self) -> bool:
        return not (self.joined or self.leaving or self._is_killed)

    def check(self, now: float) -> list[Instruction]:
        """What is due."""
        done: list[Instruction] = []
        if self._nudge_at is not None and now >= self._nudge_at:
            self._nudge_at = None
            done.append(Retire(self.name))
        if self._kill_at is not None:
            return done + (self._run_out() if now >= self._kill_at else [])
        if self._lost is not None:
            since, reason = self._lost
            late = now >= since + self.policy.lost_timeout
            return self.fail(f"was given up by the coordinator ({reason})") if late else []
        timeout = self.policy.join_timeout
        if self._must_join and timeout is not None and now >= self.started_at + timeout:
            self.doom = f"did not join within {timeout:g} s"
            self._kill_at = now + DUMP_TIMEOUT
            return [DumpStacks(self.name)]
        return done

    def _run_out(self) -> list[Instruction]:
        told = Say(f"{self.name} did not end in time and is killed", Level.WARNING, self.name)
        return [*([told] if self.doom is None else []), *self.kill()]
