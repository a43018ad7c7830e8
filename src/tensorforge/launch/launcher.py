"""The launcher: a loop that feeds the supervisor with what happens and does what it says."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.elastic.protocol.access import ROLES, is_loopback
from tensorforge.elastic.protocol.token_files import load_or_issue
from tensorforge.errors import NotFoundError
from tensorforge.launch.coordinator_link import CoordinatorLink
from tensorforge.launch.display.displays import Display, FailsafeDisplay
from tensorforge.launch.display.run_view import RunView
from tensorforge.launch.launch_settings import (
    JOURNAL_FILE,
    LOGS_FOLDER,
    WORKERS_FOLDER,
    LaunchSettings,
)
from tensorforge.launch.observations import Observer
from tensorforge.launch.processes.bootstrap import PRELOAD, STACKS_SIGNAL, STOP_SIGNAL
from tensorforge.launch.processes.children import (
    ChildEvent,
    Children,
    Exited,
    Printed,
    Reported,
    StackLine,
)
from tensorforge.launch.processes.coordinator_process import CoordinatorSettings
from tensorforge.launch.processes.log_files import LogFiles
from tensorforge.launch.run_directory import (
    RUN_FILE,
    TOKEN_FILE,
    ProcessRecord,
    RunLock,
    RunRecord,
    make_folder,
    write_record,
)
from tensorforge.launch.run_log_reader import RunLogEvents, RunLogTail
from tensorforge.launch.supervisor.events import (
    CoordinatorExited,
    CoordinatorStarted,
    Event,
    SpareReady,
    StacksDumped,
    StopRequested,
    TargetChanged,
    Tick,
    TrainingResumed,
    WorkerExited,
    WorkerStarted,
)
from tensorforge.launch.supervisor.exit_codes import UserFailure, describe_exit
from tensorforge.launch.supervisor.instructions import (
    DumpStacks,
    End,
    Instruction,
    Kill,
    Level,
    Outcome,
    Retire,
    Say,
    SetTarget,
    StartCoordinator,
    StartWorker,
    StopCoordinator,
    StopTraining,
)
from tensorforge.launch.supervisor.spares import Spares
from tensorforge.launch.supervisor.stacks import script_stack
from tensorforge.launch.supervisor.supervisor import Supervisor
from tensorforge.security import TokenStore

COORDINATOR = "coordinator"
_ERROR = "error: "
LONGEST_WAIT = 0.2
STACKS_QUIET = 0.3
LOGS_TRUSTED = 30.0
"""Seconds for which the workers' own logs tell better of steps than the coordinator, who hears less."""
COORDINATOR_STOP_SECONDS = 5.0


class Launcher:
    """One launched run. `run` returns how it ended; whatever happens, no process is left behind.

    Signals are handled if it runs in the main thread: SIGINT, SIGTERM and SIGHUP (unless that is ignored, as
    under `nohup`) stop gracefully the first time and at once the second time. A reader of the output that
    goes away stops gracefully, too; a terminal that does has sent SIGHUP.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        display: Display,
        *,
        python: str = sys.executable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._display = FailsafeDisplay(display)
        self._python = python
        self._clock = clock
        self._supervisor = Supervisor(settings.policy)
        self._view = RunView()
        self._outcome: Outcome | None = None
        self._address: str | None = None
        self._token: str | None = None
        self._token_file: Path | None = None
        self._link: CoordinatorLink | None = None
        self._coordinator_error = ""
        self._observer = Observer()
        self._failures: dict[str, UserFailure] = {}
        self._stacks: dict[str, tuple[float, list[str]]] = {}
        self._stacks_asked: set[str] = set()
        self._signals: deque[int] = deque()
        self._is_deserted = False
        self._children: Children
        self._record = RunRecord(
            script=settings.script, launcher=ProcessRecord.of(os.getpid()), workers={}
        )
        self._logs = LogFiles(settings.run_dir / LOGS_FOLDER, self._warn)
        self._is_record_told = False
        self._spares = Spares(settings.spares, settings.preloads())
        self._step = -1
        self._logged_at = -math.inf
        self._log_events = RunLogEvents()
        self._tail = RunLogTail(settings.run_dir / WORKERS_FOLDER)

    def run(self) -> Outcome:
        """Launch, supervise to the end, and return the outcome."""
        folder = self._settings.run_dir
        with RunLock(folder), contextlib.ExitStack() as stack:
            make_folder(folder / LOGS_FOLDER)
            self._prepare_token()
            self._children = stack.enter_context(Children())
            stack.callback(self._logs.close_all)
            stack.enter_context(self._handling_signals())
            stack.callback(self._close_link)
            stack.callback(self._tail.close)
            stack.callback(self._display.close)
            self._tail.read()  # what an earlier launch left there is no news
            self._loop()
            self._close_link()  # a coordinator that is watched takes its time to end
            self._end_coordinator()
        if self._outcome is None:
            raise RuntimeError("the launcher's loop ended without an outcome")
        return self._outcome

    def _loop(self) -> None:
        self._happened(TargetChanged(self._settings.policy.workers))
        self._obey(self._supervisor.begin())
        while self._outcome is None:
            for child_event in self._children.poll(self._patience()):
                self._from_child(child_event)
            if self._display.is_pipe_broken and not self._is_deserted:
                self._is_deserted = True
                self._signals.append(signal.SIGPIPE)
            while self._signals:
                self._happened(StopRequested(self._signals.popleft()))
            self._read_logs()
            self._look_at_the_cluster()
            self._settle_stacks()
            self._happened(Tick())
            self._keep_spares()
            self._display.refresh(self._view, self._clock())

    def _read_logs(self) -> None:
        for event in self._log_events.events(self._tail.read()):
            self._logged_at = self._clock()
            if isinstance(event, CommittedStep):
                self._committed(event)
                continue
            if isinstance(event, TrainingResumed):
                self._step = event.step
            self._happened(event)

    def _patience(self) -> float:
        deadline = self._supervisor.deadline()
        if deadline is None:
            return LONGEST_WAIT
        return min(LONGEST_WAIT, max(0.0, deadline - self._clock()))

    def _happened(self, event: Event) -> None:
        now = self._clock()
        self._view.apply(event, now)
        self._display.event(event, self._view, now)
        self._obey(self._supervisor.handle(event, now))

    def _from_child(self, event: ChildEvent) -> None:
        match event:
            case Printed(child, line):
                self._logs.write(child, f"{line}\n")
                if child == COORDINATOR and line.startswith(_ERROR):
                    self._coordinator_error = line.removeprefix(_ERROR)
                elif child != COORDINATOR or self._address is None:
                    self._display.printed(child, line)
            case Reported(child, message):
                self._reported(child, dict(message))
            case StackLine(child, line):
                _since, lines = self._stacks.get(child, (0.0, []))
                self._stacks[child] = (self._clock(), [*lines, line])
                self._logs.write(child, f"{line}\n")
            case Exited(child, code):
                self._exited(child, code)

    def _reported(self, child: str, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if child == COORDINATOR and kind == "serving":
            self._coordinator_serves(str(message["address"]))
        elif kind == "warm":
            self._happened(SpareReady(child))
        elif kind == "failed":
            self._failures[child] = UserFailure(
                kind=str(message.get("exception", "an exception")),
                message=str(message.get("message", "")),
                where=str(message.get("where", "")),
                traceback=str(message.get("traceback", "")),
            )
            self._logs.write(child, self._failures[child].traceback)

    def _coordinator_serves(self, address: str) -> None:
        self._address = address
        pid = self._children.pid(COORDINATOR)
        self._note(coordinator_address=address, coordinator=ProcessRecord.of(pid))
        if self._link is None:
            self._link = CoordinatorLink(address, self._token, self._children.wake)
        self._happened(CoordinatorStarted(address, pid))

    def _exited(self, child: str, code: int) -> None:
        self._logs.close(child)
        if self._spares.exited(child):
            return
        if child == COORDINATOR:
            self._note(coordinator=None)
            reason, self._coordinator_error = self._coordinator_error, ""
            self._happened(CoordinatorExited(code, reason))
            return
        record = self._record.workers[child]
        self._note(workers={n: r for n, r in self._record.workers.items() if n != child})
        if code != 0 and self._link is not None:
            self._link.report_exit(child, f"its process {describe_exit(code)}", record.pid)
        self._read_logs()
        self._look_at_the_cluster()
        self._happened(WorkerExited(child, code, self._failures.pop(child, None)))

    def _look_at_the_cluster(self) -> None:
        if self._link is None:
            return
        for news in self._link.take():
            for event in self._observer.look(news.view, answers=news.answers):
                if not isinstance(event, CommittedStep):
                    self._happened(event)
                elif self._clock() > self._logged_at + LOGS_TRUSTED:
                    self._committed(event)
            self._make_wish(self._link)

    def _make_wish(self, link: CoordinatorLink) -> None:
        wish = self._observer.next_wish()
        if wish is not None:
            link.set_target(wish.workers, wish.expected)

    def _committed(self, event: CommittedStep) -> None:
        """A step counts once, whoever tells of it first."""
        if event.step > self._step:
            self._step = event.step
            self._happened(event)

    def _settle_stacks(self) -> None:
        now = self._clock()
        for child, (heard, lines) in list(self._stacks.items()):
            if lines and now >= heard + STACKS_QUIET:
                del self._stacks[child]
                text = "\n".join(lines)
                if child in self._stacks_asked:
                    self._stacks_asked.discard(child)
                    self._happened(StacksDumped(child, text))
                else:
                    asked = f"{child} was asked for its stack by someone; it is in its log, too"
                    self._display.say(Say(asked, Level.INFO, child, script_stack(text)))

    def _obey(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            # A process that has ended in the meantime is told nothing; its exit is on its way.
            with contextlib.suppress(NotFoundError):
                self._do(instruction)

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case StartCoordinator():
                self._start_coordinator()
            case StartWorker(worker):
                self._start_worker(worker)
            case SetTarget(workers):
                self._view.target = workers
                if self._link is not None:
                    self._observer.asked(workers)
                    self._make_wish(self._link)
            case Retire(worker):
                self._children.signal(worker, signal.SIGTERM)
                self._children.signal(worker, signal.SIGCONT)  # a frozen one could not hear it
            case StopTraining(worker):
                self._children.signal(worker, STOP_SIGNAL)
            case Kill(worker):
                self._children.kill(worker)
            case DumpStacks(worker):
                self._stacks[worker] = (self._clock(), [])
                self._stacks_asked.add(worker)
                self._children.signal(worker, STACKS_SIGNAL)
            case Say():
                self._display.say(instruction)
            case StopCoordinator():
                self._children.signal(COORDINATOR, signal.SIGTERM)
            case End(outcome):
                self._outcome = outcome

    def _start_coordinator(self) -> None:
        host, port = self._settings.host, self._settings.port
        if self._address is not None:
            port = int(self._address.rpartition(":")[2])
        settings = CoordinatorSettings(
            config=self._settings.config,
            host=host,
            port=port,
            journal=str((self._settings.run_dir / JOURNAL_FILE).absolute()),
            run_id="default",
            desired_workers=self._supervisor.target,
            token_file=None if self._token_file is None else str(self._token_file.absolute()),
        )
        command = [self._python, "-m", "tensorforge.launch.processes.coordinator_process"]
        # What goes wrong is told by us; gRPC would tell it first, in its own words.
        environment = {"GRPC_VERBOSITY": "NONE", **os.environ, **settings.to_environment()}
        self._start(COORDINATOR, command, environment)

    def _start_worker(self, worker: str) -> None:
        if self._address is None:
            raise RuntimeError(
                "a worker was to be started before the coordinator's address is known"
            )
        is_waiting = self._spares.take(worker)
        start = self._children.its_turn if is_waiting else self._start_process
        pid = start(worker)
        self._note(workers={**self._record.workers, worker: ProcessRecord.of(pid)})
        self._happened(WorkerStarted(worker, pid))

    def _keep_spares(self) -> None:
        """Start what the next workers will be, while nobody waits for anything else."""
        if self._address is None or self._outcome is not None or not self._supervisor.is_settled:
            return
        for name in self._spares.to_start(self._supervisor.next_names(self._settings.spares)):
            self._start_process(name, self._spares.modules)

    def _start_process(self, worker: str, preload: tuple[str, ...] | None = None) -> int:
        environment = self._settings.worker_environment(worker, self._address or "", self._token)
        if preload is not None:
            environment[PRELOAD] = ",".join(preload)
        command = self._settings.worker_command(self._python)
        return self._start(worker, command, environment, spare=preload is not None)

    def _start(
        self, name: str, command: list[str], environment: dict[str, str], *, spare: bool = False
    ) -> int:
        self._logs.open(name)
        return self._children.start(name, command, environment, Path.cwd(), spare=spare)

    def _note(self, **changed: Any) -> None:
        self._record = replace(self._record, **changed)
        try:
            write_record(self._settings.run_dir, self._record)
        except OSError as error:
            if not self._is_record_told:
                self._is_record_told = True
                self._warn(f"{error.filename or RUN_FILE} cannot be written: {error.strerror}")

    def _warn(self, text: str) -> None:
        self._display.say(Say(text, Level.WARNING))

    def _prepare_token(self) -> None:
        if is_loopback(self._settings.host):
            return
        self._token_file = self._settings.run_dir / TOKEN_FILE
        self._token = load_or_issue(TokenStore(), self._token_file, "run", ROLES)
        where = f"the token for workers and operators is in {self._token_file}"
        self._display.say(Say(where, Level.INFO))

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` leaves it
            numbers.append(signal.SIGHUP)
        before = {n: signal.signal(n, lambda n, _: self._signals.append(n)) for n in numbers}
        wakeup = signal.set_wakeup_fd(self._children.wake_fd, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_coordinator(self) -> None:
        """Give the coordinator a moment to let go of its lease; the children's end comes anyway."""
        limit = self._clock() + COORDINATOR_STOP_SECONDS
        while COORDINATOR in self._children.names and self._clock() < limit:
            for event in self._children.poll(LONGEST_WAIT):
                if isinstance(event, Exited):
                    self._logs.close(event.child)

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
