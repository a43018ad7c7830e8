"""How a launched run ends: who ended it, with which outcome, and when all workers have exited."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from signal import SIGTERM

from tensorforge.cluster.ended_runs import EXIT_UNFINISHED
from tensorforge.launch.supervisor.events import WorkerExited
from tensorforge.launch.supervisor.exit_codes import describe_exit
from tensorforge.launch.supervisor.exit_reasons import UNASKED, ExitReasons
from tensorforge.launch.supervisor.failures import FailureLog
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
from tensorforge.launch.supervisor.tracked_worker import TrackedWorker

CONFIRMATION_TIMEOUT = 5.0
"""Seconds for the coordinator to confirm, or to correct, a worker's report that the run has ended."""


class Phase(Enum):
    """The phase of the launched run.

    RUNNING    keep the target number of workers, within the restart budget
    DRAINING   the run has ended, complete or stopped; the workers exit by themselves
    STOPPING   the workers were asked to leave, or killed; those that stay too long are killed
    ENDED      the outcome is decided and all workers have exited
    """

    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    ENDED = "ended"


class Shutdown:
    """Decides the outcome of one run; the first reason counts. Methods return instructions to carry out now.

    A worker may report that the run has ended before the coordinator does. The launcher acts on the report at
    once, but waits up to `CONFIRMATION_TIMEOUT` for the coordinator before it settles the outcome.
    """

    def __init__(
        self,
        policy: SupervisionPolicy,
        staffing: Staffing,
        exit_reasons: ExitReasons,
        failures: FailureLog,
    ) -> None:
        self.phase = Phase.RUNNING
        self._policy = policy
        self._staffing = staffing
        self._exit_reasons = exit_reasons
        self._failures = failures
        self._outcome: Outcome | None = None
        self._is_finished = False
        self._is_complete = False
        self._is_aborted = False
        self._unconfirmed_until: float | None = None

    def deadlines(self) -> Iterator[float]:
        """The times at which `end` may return instructions although no worker exits."""
        if self._unconfirmed_until is not None:
            yield self._unconfirmed_until

    def stop(self, outcome: Outcome, now: float, *, graceful: bool = True) -> list[Instruction]:
        """End the run with this outcome: stop the workers, or kill them if not `graceful`."""
        self._decide(Phase.STOPPING, outcome)
        done: list[Instruction] = []
        for worker in self._staffing.workers.values():
            done += worker.stop(now) if graceful else worker.kill()
        return done

    def interrupted(self, signal: int, now: float) -> list[Instruction]:
        """A signal asked to stop: gracefully the first time, by killing all workers the second time."""
        if self.phase is Phase.STOPPING:
            self._unconfirmed_until = None
            done: list[Instruction] = [Say("stopping now", Level.WARNING)]
            for worker in self._staffing.workers.values():
                done += worker.kill()
            return done
        text = (
            f"stopping: workers finish their step and leave, at most {self._policy.stop_timeout:g} s; "
            "interrupt again to stop at once"
        )
        outcome = self._outcome or Outcome(128 + signal, "interrupted before it finished")
        return [Say(text, Level.WARNING), *self.stop(outcome, now)]

    def finished(self, reason: str, now: float) -> None:
        """The coordinator reports that training is complete."""
        if self._takes_coordinators_word():
            self._is_aborted = False
            self._await_exits(Phase.DRAINING, Outcome(0, reason or "training finished"), now)
        self._is_finished = True

    def stopped(self, reason: str, now: float) -> None:
        """The coordinator reports that the run was stopped before its goal was reached."""
        if self._takes_coordinators_word():
            self._is_aborted = False
            self._await_exits(Phase.DRAINING, Outcome(EXIT_UNFINISHED, reason), now)

    def aborted(self, reason: str, now: float) -> None:
        """The coordinator reports that it ended the run."""
        if self._takes_coordinators_word():
            self._is_aborted = True
            self._await_exits(Phase.STOPPING, Outcome(1, reason), now)

    def reported_by_worker(self, reason: str, now: float) -> None:
        """A worker reports that the run has ended; the coordinator has not said so yet."""
        self._is_aborted, self._unconfirmed_until = True, now + CONFIRMATION_TIMEOUT
        self._await_exits(Phase.STOPPING, Outcome(1, reason), now)

    def worker_completed(self) -> None:
        """A worker's training code completed the training."""
        self._is_complete = True

    def worker_exited(self, worker: TrackedWorker, event: WorkerExited) -> list[Instruction]:
        """Show how an expected exit went, and note it as a possible cause of the run's end."""
        failure, text, detail = event.failure, describe_exit(event.code), ""
        has_no_final_line = not self._exit_reasons.has_concluded(worker.name)
        if worker.is_killed or event.code == -SIGTERM:
            text = worker.failure_cause or "was stopped"
        elif failure is not None and not failure.is_run_ended:
            text = failure.summary
            if not self._failures.is_shown_at_end(failure, self._outcome):
                detail = self._failures.traceback_once(failure)
        elif event.code == EXIT_UNFINISHED:
            text = "left before the training was complete"
        elif event.code == 0 and self._is_aborted and has_no_final_line:
            text = UNASKED
            self._failures.add_death(f"{worker.name} {text}")
        elif event.code < 0:
            self._failures.add_death(f"{worker.name} {text}")
        return [Say(f"{worker.name} {text}", Level.INFO, worker.name, detail)]

    def end(self, now: float) -> list[Instruction]:
        """End the launcher once all workers have exited and the outcome needs no more confirmation."""
        if self._unconfirmed_until is not None and now >= self._unconfirmed_until:
            self._unconfirmed_until = None
        if self._outcome is None or self._staffing.workers or self._unconfirmed_until is not None:
            return []
        self.phase = Phase.ENDED
        if self._outcome.code >= 128 and self._is_finished and self._is_complete:
            self._outcome = Outcome(0, "training finished while it was being stopped")
        if self._outcome.code == 1:
            self._outcome = self._failures.explain(self._outcome, with_deaths=self._is_aborted)
        return [StopCoordinator(), End(self._outcome)]

    def _takes_coordinators_word(self) -> bool:
        """Whether the coordinator decides the outcome: so far only a worker reported the end, or nobody did."""
        was_unconfirmed, self._unconfirmed_until = self._unconfirmed_until is not None, None
        return was_unconfirmed or self.phase is Phase.RUNNING

    def _await_exits(self, phase: Phase, outcome: Outcome, now: float) -> None:
        """Decide the outcome and expect the workers, which know of it, to exit by themselves."""
        self._decide(phase, outcome)
        for worker in self._staffing.workers.values():
            worker.await_exit(now)

    def _decide(self, phase: Phase, outcome: Outcome) -> None:
        self.phase, self._outcome = phase, outcome
        self._staffing.close()
