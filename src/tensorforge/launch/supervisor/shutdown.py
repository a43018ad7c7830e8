"""How a launched run comes to its end: who says so, what comes of it, and when everything is down."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from signal import SIGTERM

from tensorforge.launch.supervisor.events import WorkerExited
from tensorforge.launch.supervisor.exit_codes import describe_exit
from tensorforge.launch.supervisor.exit_reasons import UNASKED, Departures
from tensorforge.launch.supervisor.failures import Blame
from tensorforge.launch.supervisor.instructions import (
    End,
    Instruction,
    Level,
    Outcome,
    Say,
    StopCoordinator,
)
from tensorforge.launch.supervisor.staffing import Staffing
from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy
from tensorforge.launch.supervisor.tracked_worker import Hand

HEARSAY_TIMEOUT = 5.0
"""Seconds for the coordinator to confirm, or to correct, what a worker's last words say of the run's end."""


class Phase(Enum):
    """Where the launched run stands.

    RUNNING    keep as many workers as are asked for, within the restart budget
    DRAINING   training is complete; the workers end by themselves
    STOPPING   workers were asked to leave (or killed); whoever stays too long is killed
    ENDED      the outcome is known and everything is down
    """

    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    ENDED = "ended"


class Ending:
    """The outcome of one run. The first reason for an end counts; methods return what has to be done now.

    What a worker was told of the end is hearsay: it is acted upon at once, but the outcome waits a little for
    the coordinator, who knows.
    """

    def __init__(
        self, policy: SupervisionPolicy, staffing: Staffing, departures: Departures, blame: Blame
    ) -> None:
        self.phase = Phase.RUNNING
        self._policy = policy
        self._staffing = staffing
        self._departures = departures
        self._blame = blame
        self._outcome: Outcome | None = None
        self._is_finished = False
        self._is_complete = False
        self._is_aborted = False
        self._hearsay_until: float | None = None

    def deadlines(self) -> Iterator[float]:
        """When `end` may have something to do even if nobody exits."""
        if self._hearsay_until is not None:
            yield self._hearsay_until

    def stop(self, outcome: Outcome, now: float, *, graceful: bool = True) -> list[Instruction]:
        """The launcher ends the run."""
        self._decide(Phase.STOPPING, outcome)
        done: list[Instruction] = []
        for worker in self._staffing.workers.values():
            done += worker.stop(now) if graceful else worker.kill()
        return done

    def interrupted(self, signal: int, now: float) -> list[Instruction]:
        """Someone wants it to stop; who says so twice wants it at once."""
        if self.phase is Phase.STOPPING:
            self._hearsay_until = None
            done: list[Instruction] = [Say("stopping now", Level.WARNING)]
            for worker in self._staffing.workers.values():
                done += worker.kill()
            return done
        told = (
            f"stopping: workers finish their step and leave, at most {self._policy.stop_timeout:g} s; "
            "interrupt again to stop at once"
        )
        outcome = self._outcome or Outcome(128 + signal, "interrupted before it finished")
        return [Say(told, Level.WARNING), *self.stop(outcome, now)]

    def finished(self, reason: str, now: float) -> None:
        """The coordinator says that training is complete."""
        if self._is_news():
            self._is_aborted = False
            self._let_end(Phase.DRAINING, Outcome(0, reason or "training finished"), now)
        self._is_finished = True

    def aborted(self, reason: str, now: float) -> None:
        """The coordinator ended the run."""
        if self._is_news():
            self._is_aborted = True
            self._let_end(Phase.STOPPING, Outcome(1, reason), now)

    def heard(self, reason: str, now: float) -> None:
        """A worker was told that the run is over, but not whether it went well."""
        self._is_aborted, self._hearsay_until = True, now + HEARSAY_TIMEOUT
        self._let_end(Phase.STOPPING, Outcome(1, reason), now)

    def completed(self) -> None:
        """A worker came to the end of the training."""
        self._is_complete = True

    def exited(self, worker: Hand, event: WorkerExited) -> list[Instruction]:
        """It was to end; how it did may still be the reason of an end that was announced before."""
        failure, told, detail = event.failure, describe_exit(event.code), ""
        was_silent = not self._departures.has_concluded(worker.name)
        if worker.is_killed or event.code == -SIGTERM:
            told = worker.doom or "was stopped"
        elif failure is not None and not failure.is_echo:
            told = failure.summary
            if not self._blame.will_be_shown(failure, self._outcome):
                detail = self._blame.to_show(failure)
        elif event.code == 0 and self._is_aborted and was_silent:
            told = UNASKED
            self._blame.died(f"{worker.name} {told}")
        elif event.code < 0:
            self._blame.died(f"{worker.name} {told}")
        return [Say(f"{worker.name} {told}", Level.INFO, worker.name, detail)]

    def end(self, now: float) -> list[Instruction]:
        """It is over as soon as everybody is down and hearsay had its time."""
        if self._hearsay_until is not None and now >= self._hearsay_until:
            self._hearsay_until = None
        if self._outcome is None or self._staffing.workers or self._hearsay_until is not None:
            return []
        self.phase = Phase.ENDED
        if self._outcome.code >= 128 and self._is_finished and self._is_complete:
            self._outcome = Outcome(0, "training finished while it was being stopped")
        if self._outcome.code == 1:
            self._outcome = self._blame.explain(self._outcome, in_full=self._is_aborted)
        return [StopCoordinator(), End(self._outcome)]

    def _is_news(self) -> bool:
        """Whether nothing but hearsay told of it before; there will be no more hearsay."""
        was_hearsay, self._hearsay_until = self._hearsay_until is not None, None
        return was_hearsay or self.phase is Phase.RUNNING

    def _let_end(self, phase: Phase, outcome: Outcome, now: float) -> None:
        """The run is over and the workers know; they end by themselves."""
        self._decide(phase, outcome)
        for worker in self._staffing.workers.values():
            worker.await_end(now)

    def _decide(self, phase: Phase, outcome: Outcome) -> None:
        self.phase, self._outcome = phase, outcome
        self._staffing.close()
