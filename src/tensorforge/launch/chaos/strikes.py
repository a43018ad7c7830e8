"""Carrying out a storm against a running job, and checking the job afterwards."""

from __future__ import annotations

import contextlib
import heapq
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tensorforge.elastic.client import CoordinatorClient
from tensorforge.elastic.protocol.cluster_view import ClusterView, WorkerView
from tensorforge.errors import ConflictError, TensorForgeError
from tensorforge.launch.chaos import invariants
from tensorforge.launch.chaos.invariants import Verdict
from tensorforge.launch.chaos.storm import Candidates, StormPlan, Strike, StrikeKind, choose_victim
from tensorforge.launch.launch_settings import WORKERS_FOLDER
from tensorforge.launch.run_directory import RunRecord, read_record
from tensorforge.launch.run_log_reader import RunLogTail
from tensorforge.processes import ProcessIdentity
from tensorforge.wording import counted

POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class StrikeResult:
    """What a strike did: its victim if it had one, and a note."""

    at: float
    kind: StrikeKind
    victim: str | None
    note: str


@dataclass(slots=True)
class StormReport:
    """The results of all strikes, and which invariants hold."""

    strikes: list[StrikeResult] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def survived(self) -> bool:
        """Whether every invariant holds."""
        return all(verdict.holds for verdict in self.verdicts)


class Job:
    """A running job: its coordinator, and those of its processes that are on this machine."""

    def __init__(self, client: CoordinatorClient, folder: Path | None) -> None:
        self._client = client
        self.folder = folder
        self.generations: list[int] = []
        self.newest: ClusterView | None = None
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="storm-watch", daemon=True)

    def open(self) -> ClusterView:
        """Fetch the view and follow it from now on; raise `ConflictError` if the job has ended."""
        view = self._client.status()
        if view.ended is not None:
            raise ConflictError(f"the run is over ({view.ended.outcome}): {view.ended.reason}")
        self._saw(view)
        self._watcher.start()
        return view

    def close(self) -> None:
        """Stop following the view."""
        self._closing.set()
        self._client.close()
        if self._watcher.ident is not None:
            self._watcher.join()

    def _watch(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(TensorForgeError, ValueError):
                for view in self._client.watch():
                    self._saw(view)
            self._closing.wait(POLL_SECONDS)

    def _saw(self, view: ClusterView) -> None:
        self.newest = view
        if not self.generations or self.generations[-1] != view.generation:
            self.generations.append(view.generation)

    def candidates(self) -> Candidates:
        """What a strike can hit now."""
        view = self.newest
        members = [w for w in view.workers if w.rank >= 0] if view is not None else []
        record = self.record()
        least, most = (1, None) if view is None else (view.min_workers, view.max_workers)
        desired = None if view is None else view.desired_workers
        return Candidates(
            members=tuple(worker.id for worker in members),
            local=tuple(w.id for w in members if self.process(w) is not None),
            min_workers=least,
            max_workers=most,
            wanted=desired if desired is not None else len(members),
            coordinator_is_local=record is not None
            and record.coordinator is not None
            and record.launcher.is_running()
            and record.coordinator.is_running(),
        )

    def record(self) -> RunRecord | None:
        """The record that the launcher wrote, if the job's folder is known."""
        if self.folder is None:
            return None
        with contextlib.suppress(TensorForgeError):
            return read_record(self.folder)
        return None

    def process(self, worker: WorkerView) -> ProcessIdentity | None:
        """The worker's process, if it runs on this machine."""
        process = ProcessIdentity.from_text(worker.attributes.get("process", ""))
        return process if process is not None and process.is_running() else None

    def find(self, name: str) -> WorkerView | None:
        """The worker with this id."""
        view = self.newest
        return next((w for w in view.workers if w.id == name), None) if view else None

    def scale(self, workers: int) -> None:
        """Ask for this many workers."""
        self._client.scale(workers, "chaos")

    def remove(self, worker: str) -> None:
        """Ask a worker to leave."""
        self._client.remove(worker, "chaos")


class Storm:
    """Carries out a plan. Frozen processes are continued in all cases."""

    def __init__(
        self,
        plan: StormPlan,
        job: Job,
        on_strike: Callable[[StrikeResult], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._plan = plan
        self._job = job
        self._on_strike = on_strike
        self._clock = clock
        self._sleep = sleep
        self._frozen: list[tuple[float, int, ProcessIdentity]] = []
        self.results: list[StrikeResult] = []

    def run(self) -> list[StrikeResult]:
        """Strike as planned; return when the plan is done, or early if the run has ended."""
        start = self._clock()
        try:
            for strike in self._plan.strikes:
                if not self._wait_until(start + strike.at):
                    break
                self._strike(strike)
            self._wait_until(start + self._plan.duration)
        finally:
            self._thaw(None)
        return self.results

    def _wait_until(self, moment: float) -> bool:
        """Wait, and continue frozen processes when their time is over; `False` if the run has ended."""
        while (now := self._clock()) < moment:
            self._thaw(now)
            if self._job.newest is not None and self._job.newest.ended is not None:
                return False
            self._sleep(min(POLL_SECONDS, moment - now))
        return True

    def _strike(self, strike: Strike) -> None:
        victim = choose_victim(strike, self._job.candidates())
        note = victim.refusal
        if note is None:
            try:
                note = self._hit(strike, victim.name or "")
            except TensorForgeError as error:
                note = str(error)
        result = StrikeResult(strike.at, strike.kind, victim.name, note)
        self.results.append(result)
        self._on_strike(result)

    def _hit(self, strike: Strike, victim: str) -> str:
        match strike.kind:
            case StrikeKind.JOIN:
                self._job.scale(int(victim))
                return f"{counted(int(victim), 'worker')} wanted"
            case StrikeKind.LEAVE:
                self._job.remove(victim)
                return "asked to leave"
            case StrikeKind.COORDINATOR_KILL:
                record = self._job.record()
                coordinator = None if record is None else record.coordinator
                return _send(coordinator, signal.SIGKILL, "killed")
            case StrikeKind.KILL:
                return _send(self._process(victim), signal.SIGKILL, "killed")
            case StrikeKind.FREEZE:
                return self._freeze(self._process(victim), strike.hold)

    def _process(self, name: str) -> ProcessIdentity | None:
        worker = self._job.find(name)
        return None if worker is None else self._job.process(worker)

    def _freeze(self, process: ProcessIdentity | None, seconds: float) -> str:
        note = _send(process, signal.SIGSTOP, f"frozen for {seconds:.1f} s")
        if process is not None:
            heapq.heappush(self._frozen, (self._clock() + seconds, process.pid, process))
        return note

    def _thaw(self, now: float | None) -> None:
        while self._frozen and (now is None or self._frozen[0][0] <= now):
            heapq.heappop(self._frozen)[2].send_signal(signal.SIGCONT)


def _send(process: ProcessIdentity | None, number: int, done: str) -> str:
    if process is None or not process.send_signal(number):
        return "had exited already"
    return done


def check_job(
    job: Job, *, settle: float, until_end: bool, strikes: list[StrikeResult]
) -> StormReport:
    """Wait for the job to recover, or to end, then check the invariants."""
    recovered = _wait_for_recovery(job, settle, until_end=until_end)
    view = job.newest
    ended = None if view is None else view.ended
    verdicts = [
        invariants.run_goes_on(
            None if ended is None else ended.outcome,
            "" if ended is None else ended.reason,
            recovered,
            "" if not until_end else f", but the run has not ended within {settle:g} s",
        ),
        invariants.generations_grow(job.generations),
    ]
    if job.folder is not None:
        tail = RunLogTail(job.folder / WORKERS_FOLDER)
        lines = sorted(tail.read(), key=lambda line: float(line.get("time") or 0.0))
        tail.close()
        verdicts.append(invariants.steps_are_committed_once(lines))
        verdicts.append(invariants.members_agree(lines))
        if ended is not None and ended.outcome == "completed":
            verdicts.append(invariants.ledger_is_complete(lines))
    return StormReport(strikes=strikes, verdicts=verdicts)


def _wait_for_recovery(job: Job, settle: float, *, until_end: bool) -> bool:
    """Wait up to `settle` seconds until the job commits a step, or ends; return whether it committed one."""
    first = job.newest.state.step if job.newest is not None else -1
    limit = time.monotonic() + settle
    recovered = False
    while time.monotonic() < limit:
        view = job.newest
        if view is not None and view.ended is not None:
            return recovered
        # Not only a later step: if all workers were lost, the next step is an earlier one.
        recovered = recovered or (
            view is not None and view.phase == "active" and view.state.step != first
        )
        if recovered and not until_end:
            return True
        time.sleep(POLL_SECONDS)
    return recovered
