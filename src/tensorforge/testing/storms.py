"""Random disturbances of a `TrainingCluster`, reproducible from a seed, and what must hold afterwards."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.errors import IntegrityError
from tensorforge.testing.training_cluster import TrainingCluster

_COORDINATOR_DOWN_SECONDS = 1.0

KINDS = ("kill", "freeze", "leave", "join", "coordinator")


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What happens after which step; `choice` picks the victim."""

    after_step: int
    kind: str
    choice: int


def draw_storm(seed: int, steps: int, count: int) -> list[Disturbance]:
    """Draw `count` disturbances within a run of `steps` steps."""
    source = random.Random(seed)  # noqa: S311  reproducible, not secret
    at = sorted(source.sample(range(1, steps - 2), count))
    return [Disturbance(step, source.choice(KINDS), source.randrange(1000)) for step in at]


class Storm:
    """Carries out disturbances. It never kills, freezes or removes the last worker that has the state."""

    def __init__(self, cluster: TrainingCluster, *, most_workers: int = 4) -> None:
        self._cluster = cluster
        self._most_workers = most_workers
        self._next_name = 0
        self._is_coordinator_down = False
        self._leaving: set[str] = set()
        self.carried_out: list[str] = []

    def start(self, workers: int) -> None:
        """Start the first workers."""
        for _ in range(workers):
            self._join()

    def run(self, storm: list[Disturbance], timeout: float = 60.0) -> None:
        """Carry out each disturbance after its step, then undo them and wait for the end of the run."""
        for disturbance in storm:
            if self._is_coordinator_down:  # the next step may wait for a rescale
                self._cluster.wait_for_step(
                    disturbance.after_step, _COORDINATOR_DOWN_SECONDS, strict=False
                )
                self._undo()
            self._cluster.wait_for_step(disturbance.after_step, timeout)
            self._undo()
            if disturbance.kind == "join":
                self._join()
            elif disturbance.kind == "coordinator":
                self._kill_coordinator()
            else:
                self._hit(disturbance.kind, disturbance.choice)
        if self._is_coordinator_down:
            self._cluster.wait_for_step(1 << 60, _COORDINATOR_DOWN_SECONDS, strict=False)
        self._undo()
        self._cluster.wait_for_end(timeout)

    def _undo(self) -> None:
        """Continue frozen workers and restart the coordinator."""
        for name in sorted(self._cluster.frozen):
            self._cluster.thaw(name)
        if self._is_coordinator_down:
            self._is_coordinator_down = False
            self._cluster.start_coordinator()

    def _victims(self) -> list[str]:
        """The workers of the newest generation with a committed step, if there are at least two."""
        commits = [e for e in self._cluster.events() if e["kind"] == "commit"]
        if not commits:
            return []
        newest = max(event["generation"] for event in commits)
        active = {e["worker"] for e in commits if e["generation"] == newest}
        able = sorted(active & self._cluster.living() - self._leaving)
        return able if len(able) > 1 else []

    def _hit(self, kind: str, choice: int) -> None:
        victims = self._victims()
        if not victims:
            return
        name = victims[choice % len(victims)]
        if kind == "kill":
            self._cluster.kill(name)
        elif kind == "freeze":
            self._cluster.freeze(name)
        else:
            self._leaving.add(name)
            self._cluster.ask_to_leave(name)
        self._note(f"{kind} {name}")

    def _join(self) -> None:
        if len(self._cluster.living()) < self._most_workers:
            name = f"w{self._next_name}"
            self._next_name += 1
            self._cluster.start_worker(name)
            self._note(f"join {name}")

    def _kill_coordinator(self) -> None:
        self._cluster.kill_coordinator()
        self._is_coordinator_down = True
        self._note("kill the coordinator")

    def _note(self, what: str) -> None:
        self.carried_out.append(f"{what} after step {self._cluster.committed_step()}")


def check_history(events: list[dict[str, Any]], steps: int) -> None:
    """Raise unless every step was committed, by each worker once at most and in order, with one loss."""
    lines = [event for event in events if event["kind"] == "commit"]
    commits = [(line["worker"], CommittedStep.from_json(line)) for line in lines]
    last: dict[str, int] = {}
    losses: dict[int, float | None] = {}
    for worker, committed in commits:
        if committed is None:
            raise IntegrityError(f"{worker} logged a commit without a step")
        step = committed.step
        if step <= last.get(worker, -1):
            raise IntegrityError(f"{worker} committed step {step} after {last[worker]}")
        last[worker] = step
        if losses.setdefault(step, committed.loss) != committed.loss:
            raise IntegrityError(f"step {step} has two results")
    if losses.keys() != set(range(steps)):
        missing = sorted(set(range(steps)) - losses.keys())
        raise IntegrityError(f"steps {missing} were never committed")
