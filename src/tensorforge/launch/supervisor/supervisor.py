"""Decides which workers are started, replaced and retired, and when the run is over.

The supervisor reads no clock and touches no process: `handle(event, now)` returns the instructions for the
launcher, and `deadline()` says when the launcher must send a `Tick` at the latest.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.cluster.ended_runs import EXIT_COMPLETE, EXIT_UNFINISHED
from tensorforge.launch.supervisor.coordinator_restart import CoordinatorRestart
from tensorforge.launch.supervisor.events import (
    CoordinatorExited,
    CoordinatorStarted,
    Event,
    GenerationFormed,
    HostNotice,
    StacksDumped,
    StopRequested,
    TargetChanged,
    TrainingAborted,
    TrainingFinished,
    TrainingResumed,
    TrainingStopped,
    WorkerConcluded,
    WorkerExited,
    WorkerJoined,
    WorkerLost,
    WorkerReleased,
    WorkerStarted,
    WorkerUnplaceable,
    WorkerVanished,
)
from tensorforge.launch.supervisor.exit_codes import UserFailure, describe_exit
from tensorforge.launch.supervisor.exit_reasons import UNASKED, ExitReasons
from tensorforge.launch.supervisor.failures import FailureLog
from tensorforge.launch.supervisor.hangs import HangDetector
from tensorforge.launch.supervisor.instructions import (
    Abandon,
    DumpStacks,
    Instruction,
    Level,
    Outcome,
    Say,
    SetTarget,
    StartCoordinator,
)
from tensorforge.launch.supervisor.restart_budget import RestartBudget
from tensorforge.launch.supervisor.shutdown import Phase, Shutdown
from tensorforge.launch.supervisor.stacks import script_stack
from tensorforge.launch.supervisor.staffing import Staffing
from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy


class Supervisor:
    """The decisions of one launched run. Not thread-safe: it belongs to the launcher's loop."""

    def __init__(self, policy: SupervisionPolicy) -> None:
        self._policy = policy
        self._exit_reasons = ExitReasons()
        self._staffing = Staffing(policy, self._exit_reasons)
        self._hangs = HangDetector(policy.hang_timeout)
        self._failures = FailureLog()
        self._shutdown = Shutdown(policy, self._staffing, self._exit_reasons, self._failures)
        self._ever_joined = False
        self._coordinator = CoordinatorRestart()
        self._out: list[Instruction] = []

    @property
    def phase(self) -> Phase:
        """The phase of the run."""
        return self._shutdown.phase

    @property
    def target(self) -> int:
        """How many local workers are wanted now."""
        return self._staffing.target

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers whose processes run as far as the supervisor knows, in the order of their start."""
        return tuple(self._staffing.workers)

    @property
    def is_settled(self) -> bool:
        """Whether all workers that were started have joined or are leaving."""
        everybody = self._staffing.workers.values()
        return self.phase is Phase.RUNNING and all(w.joined or w.leaving for w in everybody)

    def next_names(self, count: int) -> list[str]:
        """The names of the next workers to start."""
        return self._staffing.next_names(count)

    def begin(self) -> list[Instruction]:
        """Start the coordinator; the workers follow once its address is known."""
        return [StartCoordinator()]

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in what happened and return what to do, in this order."""
        self._out = []
        if self.phase is Phase.ENDED:
            return []
        self._handle_host(event, now)
        self._handle_worker(event, now)
        self._handle_run(event, now)
        self._check_deadlines(now)
        if self.phase is Phase.RUNNING and self._coordinator.has_served:
            self._out += self._staffing.reconcile(now)
        self._out += self._shutdown.end(now)
        return self._out

    def deadline(self) -> float | None:
        """The time of the next `Tick` that is needed even if nothing else happens."""
        return None if self.phase is Phase.ENDED else min(self._deadlines(), default=None)

    def _deadlines(self) -> Iterator[float]:
        yield from self._staffing.deadlines()
        yield from self._exit_reasons.deadlines()
        if self._coordinator.restart_at is not None:
            yield self._coordinator.restart_at
        yield from self._shutdown.deadlines()
        hang = self._hangs.deadline()
        if hang is not None and self.phase is Phase.RUNNING:
            yield hang

    def _handle_host(self, event: Event, now: float) -> None:
        match event:
            case WorkerStarted(worker, host=host):
                self._staffing.worker_placed(worker, host, now)
            case WorkerUnplaceable(worker, reason):
                self._host_failed(worker, f"found no place ({reason})", now)
            case WorkerVanished(worker, reason):
                self._out.append(Abandon(worker))
                self._host_failed(worker, f"vanished ({reason})", now)
            case HostNotice(worker, seconds, reason):
                self._out += self._staffing.host_ends(worker, seconds, reason, now)

    def _handle_worker(self, event: Event, now: float) -> None:
        match event:
            case WorkerJoined(worker):
                self._ever_joined = True
                self._out += self._staffing.worker_joined(worker)
                self._hangs.progressed(now, committed=False)
            case WorkerLost(worker, reason):
                self._out += self._staffing.worker_lost(worker, reason, now)
            case WorkerReleased(worker, reason, surplus):
                self._out += self._staffing.worker_released(worker, reason, now, surplus=surplus)
            case WorkerConcluded(worker, outcome):
                if outcome == "complete":
                    self._shutdown.worker_completed()
                self._exit_reasons.concluded(worker, outcome)
            case WorkerExited():
                self._worker_exited(event, now)
            case StacksDumped(worker, text):
                self._stack_arrived(worker, text)

    def _handle_run(self, event: Event, now: float) -> None:
        match event:
            case CoordinatorStarted():
                self._coordinator_started(event, now)
            case CoordinatorExited():
                self._coordinator_exited(event, now)
            case CommittedStep():
                self._step_committed(now)
            case TrainingResumed():
                self._training_resumed(event, now)
            case GenerationFormed():
                self._generation_formed(event, now)
            case TargetChanged(workers):
                self._out += self._staffing.operator_wants(workers, now)
            case TrainingFinished(reason):
                self._shutdown.finished(reason, now)
            case TrainingStopped(reason):
                self._shutdown.stopped(reason, now)
            case TrainingAborted(reason):
                self._shutdown.aborted(reason, now)
            case StopRequested(signal):
                self._out += self._shutdown.interrupted(signal, now)

    def _coordinator_started(self, event: CoordinatorStarted, now: float) -> None:
        self._say(f"coordinator at {event.address}", Level.INFO)
        self._exit_reasons.coordinator_is(True, now)
        if self._coordinator.serving(now):
            # A journal from an earlier launch may ask for another number.
            self._out.append(SetTarget(self.target))

    def _coordinator_exited(self, event: CoordinatorExited, now: float) -> None:
        said = f": {event.reason}" if event.reason else ""
        what = f"the coordinator {describe_exit(event.code)}{said}"
        self._exit_reasons.coordinator_is(False, now)
        if not self._coordinator.has_served and event.reason:
            text = f"the coordinator did not start: {event.reason}"
            self._out += self._shutdown.stop(Outcome(1, text), now)
            return
        pause = self._coordinator.exited(now)
        if pause is None:
            text = f"{what} before it served"
            self._out += self._shutdown.stop(Outcome(1, text), now, graceful=self._ever_joined)
            return
        when = f"in {pause:.1f} s" if pause else "at once"
        text = f"{what}; it is restarted on its journal {when}, training continues"
        self._say(text, Level.WARNING)

    def _worker_exited(self, event: WorkerExited, now: float) -> None:
        worker = self._staffing.workers.pop(event.worker, None)
        if worker is None:
            return
        if event.failure is not None:
            self._failures.add_exception(worker.name, event.failure)
        if self.phase is not Phase.RUNNING or worker.leaving:
            self._out += self._shutdown.worker_exited(worker, event)
        elif worker.failure_cause is not None:
            self._failed(worker.name, worker.failure_cause, None, now)
        elif event.code in (EXIT_COMPLETE, EXIT_UNFINISHED):
            self._exit_reasons.exited(worker.name, now, anybody_joined=self._ever_joined)
        else:
            self._failed(worker.name, describe_exit(event.code), event.failure, now)

    def _step_committed(self, now: float) -> None:
        self._staffing.step_committed()
        self._failures.step_committed()
        self._ever_joined = True
        self._hangs.progressed(now)

    def _training_resumed(self, event: TrainingResumed, now: float) -> None:
        self._hangs.progressed(now)
        text = f"training continues from the checkpoint of step {event.step}"
        if event.step < 0:
            text = "training starts from the beginning because there is no checkpoint"
        if event.before is None:
            self._say(text, Level.INFO)
        else:
            lost = f"all workers with the state of step {event.before} are gone"
            self._say(f"{lost}; {text}", Level.WARNING)

    def _generation_formed(self, event: GenerationFormed, now: float) -> None:
        self._ever_joined = True
        self._staffing.generation_formed(event.members)
        self._hangs.progressed(now, committed=False)

    def _stack_arrived(self, name: str, text: str) -> None:
        self._hangs.stack_arrived(name, text)
        worker = self._staffing.workers.get(name)
        if worker is not None:
            self._out += worker.stack_arrived(script_stack(text))

    def _failed(self, name: str, what: str, failure: UserFailure | None, now: float) -> None:
        text = f"{name} {what if failure is None else failure.summary}"
        if failure is None:
            self._failures.add_death(text)
        elif failure.is_run_ended:
            self._shutdown.reported_by_worker(failure.message, now)
            return
        elif (recurs := self._failures.is_repeated(failure)) or not self._ever_joined:
            # The same exception twice is a bug, and so is one before any worker has joined.
            outcome = Outcome(1, text + (", again" if recurs else ""), name, failure)
            self._out += self._shutdown.stop(outcome, now, graceful=self._ever_joined)
            return
        is_replaced = self._staffing.worker_failed(now)
        self._show_failure(text, self._staffing.budget, is_replaced, now, name, failure)

    def _host_failed(self, name: str, what: str, now: float) -> None:
        """The worker ended without a fault of the script: it vanished, or it was never started."""
        worker = self._staffing.workers.pop(name, None)
        if worker is None:
            return
        text = f"{name} {what}"
        if self.phase is not Phase.RUNNING or worker.leaving:
            self._say(text, Level.INFO, name)
            return
        self._failures.add_death(text)
        is_replaced = self._staffing.host_failed(now)
        self._show_failure(text, self._staffing.host_budget, is_replaced, now, name)

    def _show_failure(
        self,
        text: str,
        budget: RestartBudget,
        is_replaced: bool,
        now: float,
        name: str,
        failure: UserFailure | None = None,
    ) -> None:
        """Say that the worker is replaced; if it is not, go on with the others or end the run."""
        if is_replaced:
            left = f"{budget.left(now)} of {budget.limit} restarts left"
            detail = self._failures.traceback_once(failure)
            self._say(f"{text}; it is replaced ({left})", Level.WARNING, name, detail)
            return
        text += f"; the restart budget is spent ({budget.limit} in {budget.window:g} s)"
        if self._staffing.reachable < self._policy.min_workers:
            least = f"fewer than min_workers ({self._policy.min_workers}) are left"
            self._out += self._shutdown.stop(Outcome(1, f"{text} and {least}", name, failure), now)
        else:
            rest = f"going on with {self._staffing.reachable}"
            self._say(
                f"{text}, {rest}", Level.WARNING, name, self._failures.traceback_once(failure)
            )

    def _check_deadlines(self, now: float) -> None:
        if self._coordinator.take_due(now):
            self._out.append(StartCoordinator())
        for worker in list(self._staffing.workers.values()):
            self._out += worker.due(now)
        for name in self._exit_reasons.overdue(now):
            if self._exit_reasons.left_by_itself(name):
                self._out += self._staffing.worker_left(name)
            else:
                self._exited_unexplained(name, now)
        if self.phase is Phase.RUNNING:
            self._check_progress(now)

    def _exited_unexplained(self, name: str, now: float) -> None:
        if not self._ever_joined:
            reason = (
                f"{name} ended without training: the script must open a run of tensorforge.train "
                "and step through it"
            )
            self._out += self._shutdown.stop(Outcome(1, reason, name), now, graceful=False)
            return
        self._failed(name, UNASKED, None, now)

    def _check_progress(self, now: float) -> None:
        for name in self._hangs.workers_to_ask(self._staffing.can_hang(), now):
            self._out.append(DumpStacks(name))
        verdict = self._hangs.verdict(now)
        if verdict is None:
            return
        silent = f"no progress for {self._policy.hang_timeout:g} s"
        for name in verdict.hung:
            if name in self._staffing.workers:
                stack = script_stack(verdict.stacks.get(name, ""))
                self._out += self._staffing.workers[name].kill_as_failed(f"hangs: {silent}", stack)
        if not verdict.hung and verdict.in_a_row == 1:
            self._say(f"{silent}: every worker waits for the others", Level.WARNING)
            for name, text in sorted(verdict.stacks.items()):
                self._say(f"where {name} waits", Level.INFO, name, script_stack(text))
        elif not verdict.hung:
            reason = f"{silent}, twice in a row, and every worker waits for the others"
            self._out += self._shutdown.stop(Outcome(1, reason), now)

    def _say(self, text: str, level: Level, worker: str | None = None, detail: str = "") -> None:
        self._out.append(Say(text, level, worker, detail))
