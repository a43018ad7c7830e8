"""Random storms against a `LocalCluster`, reproducible from a seed, and what must hold afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorforge.errors import IntegrityError
from tensorforge.testing.cluster import LocalCluster

_LEADERLESS_SECONDS = 1.0

KINDS = ("kill", "freeze", "leave", "join", "coordinator")


@dataclass(frozen=True, slots=True)
class Blow:
    """One disturbance: after which step, of which kind, and a number that picks the victim."""

    after_step: int
    kind: str
    choice: int


def draw_storm(seed: int, steps: int, blows: int) -> list[Blow]:
    """A storm that fits into a run of `steps` steps."""
    source = random.Random(seed)  # noqa: S311  reproducible, not secret
    at = sorted(source.sample(range(1, steps - 2), blows))
    return [Blow(step, source.choice(KINDS), source.randrange(1000)) for step in at]


class Storm:
    """Carries blows out. It never takes the last worker that has the state."""

    def __init__(self, cluster: LocalCluster, *, most_workers: int = 4) -> None:
        self._cluster = cluster
        self._most_workers = most_workers
        self._next_name = 0
        self._is_leaderless = False
        self._leaving: set[str] = set()
        self.carried_out: list[str] = []

    def start(self, workers: int) -> None:
        """Start the first workers."""
        for _ in range(workers):
            self._join()

    def rage(self, storm: list[Blow], timeout: float = 60.0) -> None:
        """Carry every blow out at its time, then end the disturbances and let the run end."""
        actions: dict[str, Callable[[int], None]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "leave": self._leave,
            "join": lambda _choice: self._join(),
            "coordinator": lambda _choice: self._behead(),
        }
        for blow in storm:
            if self._is_leaderless:  # a rescale may need it before the next step can be
                self._cluster.wait_for_step(blow.after_step, _LEADERLESS_SECONDS, strict=False)
                self._calm()
            self._cluster.wait_for_step(blow.after_step, timeout)
            self._calm()
            actions[blow.kind](blow.choice)
        if self._is_leaderless:
            self._cluster.wait_for_step(1 << 60, _LEADERLESS_SECONDS, strict=False)
        self._calm()
        self._cluster.wait_for_end(timeout)

    def _calm(self) -> None:
        """End what lasts: thaw the frozen, bring the coordinator back."""
        for name in sorted(self._cluster.frozen):
            self._cluster.thaw(name)
        if self._is_leaderless:
            self._is_leaderless = False
            self._cluster.start_coordinator()

    def _victims(self) -> list[str]:
        """Workers that can be spared: of those in the newest generation that trains, all but one."""
        commits = [e for e in self._cluster.events() if e["kind"] == "commit"]
        if not commits:
            return []
        newest = max(event["generation"] for event in commits)
        active = {e["worker"] for e in commits if e["generation"] == newest}
        able = sorted(active & self._cluster.living() - self._leaving)
        return able if len(able) > 1 else []

    def _pick(self, choice: int) -> str | None:
        victims = self._victims()
        return victims[choice % len(victims)] if victims else None

    def _kill(self, choice: int) -> None:
        if (name := self._pick(choice)) is not None:
            self._cluster.kill(name)
            self._note(f"kill {name}")

    def _freeze(self, choice: int) -> None:
        if (name := self._pick(choice)) is not None:
            self._cluster.freeze(name)
            self._note(f"freeze {name}")

    def _leave(self, choice: int) -> None:
        if (name := self._pick(choice)) is not None:
            self._leaving.add(name)
            self._cluster.ask_to_leave(name)
            self._note(f"leave {name}")

    def _join(self) -> None:
        if len(self._cluster.living()) < self._most_workers:
            name = f"w{self._next_name}"
            self._next_name += 1
            self._cluster.start_worker(name)
            self._note(f"join {name}")

    def _behead(self) -> None:
        self._cluster.kill_coordinator()
        self._is_leaderless = True
        self._note("kill the coordinator")

    def _note(self, what: str) -> None:
        self.carried_out.append(f"{what} after step {self._cluster.committed_step()}")


def check_history(events: list[dict[str, Any]], steps: int) -> None:
    """Every step was committed, by each worker at most once and in order, with one result for all."""
    commits = [event for event in events if event["kind"] == "commit"]
    if {event["step"] for event in commits} != set(range(steps)):
        missing = sorted(set(range(steps)) - {event["step"] for event in commits})
        raise IntegrityError(f"steps {missing} were never committed")
    last: dict[str, int] = {}
    loss: dict[int, float] = {}
    for event in commits:
        worker, step = event["worker"], event["step"]
        if step <= last.get(worker, -1):
            raise IntegrityError(f"{worker} committed step {step} after {last[worker]}")
        last[worker] = step
        if loss.setdefault(step, event["metrics"]["loss"]) != event["metrics"]["loss"]:
            raise IntegrityError(f"step {step} has two results")
