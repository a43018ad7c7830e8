"""The launcher: a loop that passes events to the supervisor and carries out its instructions."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.cluster.ended_runs import EXIT_COMPLETE, EXIT_UNFINISHED
from tensorforge.elastic.protocol.access import ROLES, is_loopback
from tensorforge.elastic.protocol.token_files import load_or_issue
from tensorforge.encoding import Json
from tensorforge.environment import PRELOAD, for_child
from tensorforge.errors import NotFoundError
from tensorforge.launch.coordinator_link import CoordinatorLink
from tensorforge.launch.crew.crew import (
    Crew,
    CrewEvent,
    Logged,
    Notice,
    Order,
    Placed,
    Unplaceable,
    Vanished,
)
from tensorforge.launch.crew.local_crew import LocalCrew
from tensorforge.launch.device_slots import DeviceSlots
from tensorforge.launch.display.displays import Display, FailsafeDisplay
from tensorforge.launch.display.run_view import RunView
from tensorforge.launch.launch_settings import (
    JOURNAL_FILE,
    LOGS_FOLDER,
    WORKERS_FOLDER,
    LaunchSettings,
)
from tensorforge.launch.observations import Observer
from tensorforge.launch.processes.bootstrap import STACKS_SIGNAL, STOP_SIGNAL
from tensorforge.launch.processes.children import Exited, Printed, Reported, StackLine
from tensorforge.launch.processes.coordinator_process import CoordinatorSettings
from tensorforge.launch.processes.log_files import LogFiles
from tensorforge.launch.run_directory import (
    RUN_FILE,
    TOKEN_FILE,
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
    HostNotice,
    SpareReady,
    StacksDumped,
    StopRequested,
    TargetChanged,
    Tick,
    TrainingResumed,
    WorkerExited,
    WorkerStarted,
    WorkerUnplaceable,
    WorkerVanished,
)
from tensorforge.launch.supervisor.exit_codes import UserFailure, describe_exit
from tensorforge.launch.supervisor.instructions import (
    Abandon,
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
from tensorforge.processes import ProcessIdentity
from tensorforge.security import TokenStore

COORDINATOR = "coordinator"
_ERROR = "error: "
LONGEST_WAIT = 0.2
STACK_QUIET_SECONDS = 0.3
"""A stack dump is complete when no line came for this long."""
LOG_SILENCE_SECONDS = 30.0
"""Steps come from the workers' logs; only after this long without a log line, from the coordinator's views."""
COORDINATOR_STOP_SECONDS = 5.0


class Launcher:
    """One launched run. `run` returns its outcome; in all cases no child process survives it.

    In the main thread, the launcher handles SIGINT, SIGTERM and SIGHUP (unless that is ignored, as under
    `nohup`): the first signal stops the run gracefully, the second one at once. If the reader of the output
    closes its pipe, the run is stopped gracefully as well. `crew` makes the crew that starts the workers; by
    default they are child processes of the launcher.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        display: Display,
        *,
        crew: Callable[[], Crew] | None = None,
        python: str = sys.executable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._display = FailsafeDisplay(display)
        self._make_crew = crew or (lambda: LocalCrew(python))
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
        self._stacks_requested: set[str] = set()
        self._signals: deque[int] = deque()
        self._reader_is_gone = False
        self._crew: Crew
        self._pids: dict[str, int] = {}
        self._record = RunRecord(
            script=settings.script, launcher=ProcessIdentity.current(), workers={}
        )
        self._logs = LogFiles(settings.run_dir / LOGS_FOLDER, self._warn)
        self._has_warned_of_record = False
        self._spares = Spares(settings.spares, settings.preloads())
        self._devices = DeviceSlots(settings.gpus_per_worker, os.environ)
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
            self._crew = self._make_crew()
            stack.callback(self._crew.close)
            stack.callback(self._logs.close_all)
            stack.enter_context(self._handling_signals())
            stack.callback(self._close_link)
            stack.callback(self._tail.close)
            stack.callback(self._display.close)
            self._tail.read()  # skip the lines of an earlier launch
            self._loop()
            self._close_link()  # a coordinator with an open stream takes longer to exit
            self._end_coordinator()
        if self._outcome is None:
            raise RuntimeError("the launcher's loop ended without an outcome")
        return self._outcome

    def _loop(self) -> None:
        self._handle(TargetChanged(self._settings.policy.workers))
        self._execute(self._supervisor.begin())
        while self._outcome is None:
            for crew_event in self._crew.poll(self._poll_timeout()):
                self._handle_output(crew_event)
                self._handle_place(crew_event)
            if self._display.is_pipe_broken and not self._reader_is_gone:
                self._reader_is_gone = True
                self._signals.append(signal.SIGPIPE)
            while self._signals:
                self._handle(StopRequested(self._signals.popleft()))
            self._read_logs()
            self._read_views()
            self._collect_stacks()
            self._handle(Tick())
            self._start_spares()
            self._display.refresh(self._view, self._clock())

    def _read_logs(self) -> None:
        self._handle_logged(self._tail.read())

    def _handle_logged(self, lines: Iterable[Mapping[str, Json]]) -> None:
        for event in self._log_events.events(lines):
            self._logged_at = self._clock()
            if isinstance(event, CommittedStep):
                self._committed(event)
                continue
            if isinstance(event, TrainingResumed):
                self._step = event.step
            self._handle(event)

    def _poll_timeout(self) -> float:
        deadline = self._supervisor.deadline()
        if deadline is None:
            return LONGEST_WAIT
        return min(LONGEST_WAIT, max(0.0, deadline - self._clock()))

    def _handle(self, event: Event) -> None:
        now = self._clock()
        self._view.apply(event, now)
        self._display.event(event, self._view, now)
        self._execute(self._supervisor.handle(event, now))

    def _handle_place(self, event: CrewEvent) -> None:
        match event:
            case Placed():
                self._placed(event)
            case Notice(worker, seconds, reason):
                self._handle(HostNotice(worker, seconds, reason))
            case Vanished(worker, reason):
                self._forget(worker)
                if not self._spares.exited(worker):
                    self._handle(WorkerVanished(worker, reason))
            case Unplaceable(worker, reason):
                self._forget(worker)
                if not self._spares.exited(worker):
                    self._handle(WorkerUnplaceable(worker, reason))

    def _placed(self, event: Placed) -> None:
        self._pids[event.worker] = event.pid
        if not event.host:  # the record is for processes of this machine
            identity = ProcessIdentity.of(event.pid)
            self._update_record(workers={**self._record.workers, event.worker: identity})
        self._handle(WorkerStarted(event.worker, event.pid, event.host, event.devices))

    def _forget(self, worker: str) -> int:
        """Close the log of a worker that is gone, drop its record and devices; return its last pid, or 0."""
        self._logs.close(worker)
        self._devices.release(worker)
        if worker in self._record.workers:
            others = {n: r for n, r in self._record.workers.items() if n != worker}
            self._update_record(workers=others)
        return self._pids.pop(worker, 0)

    def _handle_output(self, event: CrewEvent) -> None:
        match event:
            case Logged(_, line):
                self._handle_logged([line])
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
            self._handle(SpareReady(child))
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
        pid = self._pids[COORDINATOR]
        self._update_record(coordinator_address=address, coordinator=ProcessIdentity.of(pid))
        if self._link is None:
            self._link = CoordinatorLink(address, self._token, self._crew.wake)
        self._handle(CoordinatorStarted(address, pid))

    def _exited(self, child: str, code: int) -> None:
        pid = self._forget(child)
        if self._spares.exited(child):
            return
        if child == COORDINATOR:
            self._update_record(coordinator=None)
            reason, self._coordinator_error = self._coordinator_error, ""
            self._handle(CoordinatorExited(code, reason))
            return
        if code not in (EXIT_COMPLETE, EXIT_UNFINISHED) and self._link is not None:
            self._link.report_exit(child, f"its process {describe_exit(code)}", pid)
        self._read_logs()
        self._read_views()
        self._handle(WorkerExited(child, code, self._failures.pop(child, None)))

    def _read_views(self) -> None:
        if self._link is None:
            return
        for update in self._link.take_updates():
            for event in self._observer.look(update.view, answers=update.answers):
                if not isinstance(event, CommittedStep):
                    self._handle(event)
                elif self._clock() > self._logged_at + LOG_SILENCE_SECONDS:
                    self._committed(event)
            self._request_target(self._link)

    def _request_target(self, link: CoordinatorLink) -> None:
        request = self._observer.next_request()
        if request is not None:
            link.set_target(request.workers, request.expected)

    def _committed(self, event: CommittedStep) -> None:
        """Handle a step once, from whichever source it comes first."""
        if event.step > self._step:
            self._step = event.step
            self._handle(event)

    def _collect_stacks(self) -> None:
        now = self._clock()
        for child, (last_line_at, lines) in list(self._stacks.items()):
            if lines and now >= last_line_at + STACK_QUIET_SECONDS:
                del self._stacks[child]
                text = "\n".join(lines)
                if child in self._stacks_requested:
                    self._stacks_requested.discard(child)
                    self._handle(StacksDumped(child, text))
                else:
                    notice = f"{child} received SIGUSR1 and dumped its stack; its log has it, too"
                    self._display.say(Say(notice, Level.INFO, child, script_stack(text)))

    def _execute(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            # A process that has exited cannot be signalled; the event of its exit follows.
            with contextlib.suppress(NotFoundError):
                self._do(instruction)

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case StartCoordinator():
                self._start_coordinator()
            case SetTarget(workers):
                self._view.target = workers
                if self._link is not None:
                    self._observer.asked(workers)
                    self._request_target(self._link)
            case Say():
                self._display.say(instruction)
            case StopCoordinator():
                self._crew.signal(COORDINATOR, signal.SIGTERM)
            case End(outcome):
                self._outcome = outcome
            case _:
                self._do_to_worker(instruction)

    def _do_to_worker(self, instruction: Instruction) -> None:
        match instruction:
            case StartWorker(worker, avoid):
                self._start_worker(worker, avoid)
            case Abandon(worker):
                self._crew.abandon(worker)
            case Retire(worker):
                self._crew.signal(worker, signal.SIGTERM)
            case StopTraining(worker):
                self._crew.signal(worker, STOP_SIGNAL)
            case Kill(worker):
                self._crew.kill(worker)
            case DumpStacks(worker):
                self._stacks[worker] = (self._clock(), [])
                self._stacks_requested.add(worker)
                self._crew.signal(worker, STACKS_SIGNAL)

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
        # The launcher shows the coordinator's errors; without this, gRPC prints its own first.
        environment = {"GRPC_VERBOSITY": "NONE", **os.environ, **settings.to_environment()}
        self._logs.open(COORDINATOR)
        self._pids[COORDINATOR] = self._crew.start_here(COORDINATOR, command, environment)

    def _start_worker(self, worker: str, avoid: frozenset[str]) -> None:
        if self._address is None:
            raise RuntimeError(
                "a worker cannot be started before the coordinator's address is known"
            )
        if self._spares.take(worker):
            self._crew.its_turn(worker, {})
        else:
            self._order(worker, avoid=avoid)

    def _start_spares(self) -> None:
        """Start the spares for the next workers, once all workers have joined."""
        if self._address is None or self._outcome is not None or not self._supervisor.is_settled:
            return
        for name in self._spares.to_start(self._supervisor.next_names(self._settings.spares)):
            self._order(name, self._spares.modules)

    def _order(
        self,
        worker: str,
        preload: tuple[str, ...] | None = None,
        avoid: frozenset[str] = frozenset(),
    ) -> None:
        variables = self._settings.worker_variables(worker, self._address or "", self._token)
        variables |= self._devices.take(worker)
        if preload is not None:
            variables |= for_child({PRELOAD: preload})
        self._logs.open(worker)
        order = Order(
            words=self._settings.worker_words(),
            variables=variables,
            spare=preload is not None,
            avoid=avoid,
        )
        self._crew.start(worker, order)

    def _update_record(self, **changed: Any) -> None:
        self._record = replace(self._record, **changed)
        try:
            write_record(self._settings.run_dir, self._record)
        except OSError as error:
            if not self._has_warned_of_record:
                self._has_warned_of_record = True
                self._warn(f"{error.filename or RUN_FILE} cannot be written: {error.strerror}")

    def _warn(self, text: str) -> None:
        self._display.say(Say(text, Level.WARNING))

    def _prepare_token(self) -> None:
        """Issue the run's token, on loopback too: other users of this machine can reach that."""
        self._token_file = self._settings.run_dir / TOKEN_FILE
        self._token = load_or_issue(TokenStore(), self._token_file, "run", ROLES)
        if is_loopback(self._settings.host):
            return
        notice = f"the token for workers and operators is in {self._token_file}"
        self._display.say(Say(notice, Level.INFO))
        self._warn(
            f"tensors travel between workers unencrypted, and gloo's ports at {self._settings.host} ask "
            "for no token: let only the machines of this run reach them (SECURITY.md)"
        )

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` ignores it
            numbers.append(signal.SIGHUP)
        before = {n: signal.signal(n, lambda n, _: self._signals.append(n)) for n in numbers}
        wakeup = signal.set_wakeup_fd(self._crew.wake_fd, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_coordinator(self) -> None:
        """Wait for the coordinator to release its lease; `Crew.close` kills it if it takes too long."""
        limit = self._clock() + COORDINATOR_STOP_SECONDS
        while COORDINATOR in self._crew.names and self._clock() < limit:
            for event in self._crew.poll(LONGEST_WAIT):
                if isinstance(event, Exited):
                    self._logs.close(event.child)

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
