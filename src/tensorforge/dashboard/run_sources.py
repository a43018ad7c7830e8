"""Where the facts about runs come from: the folders of launched runs, and coordinators by their address."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tensorforge.dashboard.metrics_index import MetricsIndex, MetricsLine
from tensorforge.elastic.client import CoordinatorClient
from tensorforge.elastic.coordinator.journal import Journal
from tensorforge.elastic.coordinator.journal_records import DurableState, replay
from tensorforge.elastic.protocol.cluster_view import ClusterView
from tensorforge.elastic.protocol.rescale_record import RescaleRecord
from tensorforge.elastic.protocol.token_files import read_token
from tensorforge.errors import EncodingError, NotFoundError, TensorForgeError, UnavailableError
from tensorforge.launch.launch_settings import JOURNAL_FILE, LOGS_FOLDER
from tensorforge.launch.run_directory import RUN_FILE, TOKEN_FILE, RunRecord, read_record
from tensorforge.storage.database import Database

METRICS_FILE = "metrics.jsonl"
STATUS_SECONDS = 3.0
"""How long a coordinator may take to answer before its run counts as unreachable."""
RUNNING, ENDED, UNREACHABLE, UNKNOWN = "running", "ended", "unreachable", "recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One line of the list of runs. `updated` is when its newest step was written, in seconds since 1970."""

    run_id: str
    script: str
    state: str
    workers: int
    step: int | None
    loss: float | None
    updated: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """What is known about a run at one moment; `problem` says why its coordinator gave no view."""

    summary: RunSummary
    view: ClusterView | None
    rescales: tuple[RescaleRecord, ...]
    outcome: str
    problem: str


class RunSource:
    """One run: its folder, its coordinator, or both. Threads may share it."""

    def __init__(
        self,
        run_id: str,
        *,
        folder: Path | None = None,
        address: str | None = None,
        token: str | None = None,
    ) -> None:
        self.run_id = run_id
        self.folder = folder
        self.metrics = MetricsIndex(Path(os.devnull) if folder is None else folder / METRICS_FILE)
        self._address, self._token = address, token
        # Paths as text: the list of runs looks at each of them, and making a `Path` costs more than that.
        self._run_file = "" if folder is None else str(folder / RUN_FILE)
        self._metrics_file = "" if folder is None else str(folder / METRICS_FILE)
        self._ended_record: RunRecord | None = None
        self._lock = threading.Lock()
        self._record: tuple[int, RunRecord | None] = (-1, None)
        self._last: tuple[tuple[int, int], MetricsLine | None] = ((-1, -1), None)
        self._journal: tuple[int, DurableState | None] = (-1, None)
        self._client: tuple[str, CoordinatorClient] | None = None

    def summary(self) -> RunSummary:
        """The line in the list of runs, from the folder alone if there is one."""
        record, last = self.record(), self._last_line()
        if self.folder is None:
            return self._summary_of_coordinator()
        is_running = self._is_running(record)
        return RunSummary(
            run_id=self.run_id,
            script="" if record is None else Path(record.script).name,
            state=UNKNOWN if record is None else RUNNING if is_running else ENDED,
            workers=len(record.workers) if record is not None and is_running else 0,
            step=None if last is None else last.step,
            loss=_loss(last),
            updated=last.time if last is not None else self._record[0] / 1e9,
        )

    def snapshot(self) -> RunSnapshot:
        """All that the page of the run shows beside its curves."""
        view, problem = None, ""
        try:
            view = self.client().status()
        except TensorForgeError as error:
            problem = str(error)
        summary = self.summary() if self.folder is not None else self._summary(view)
        durable = self._durable() if view is None else None
        outcome = ""
        if view is not None and view.ended is not None:
            outcome = f"{view.ended.outcome}: {view.ended.reason}"
        elif durable is not None and durable.ended is not None and summary.state == ENDED:
            outcome = f"{durable.ended.outcome}: {durable.ended.reason}"
        found = view.rescales if view is not None else durable.history if durable else []
        return RunSnapshot(
            summary=summary,
            view=view,
            rescales=tuple(found),
            outcome=outcome,
            problem="" if summary.state == ENDED else problem,
        )

    def record(self) -> RunRecord | None:
        """The processes of the run, as its launcher wrote them last."""
        if self.folder is None:
            return None
        modified = _modified(self._run_file)
        if modified != self._record[0]:
            record = None
            with contextlib.suppress(NotFoundError, EncodingError):
                record = read_record(self.folder)
            self._record = (modified, record)
        return self._record[1]

    def client(self) -> CoordinatorClient:
        """A connection to the coordinator; `UnavailableError` if the run has none now."""
        record = self.record()
        address = self._address
        if record is not None and self._is_running(record):
            address = record.coordinator_address
        if address is None:
            raise UnavailableError("the run has no coordinator: it is not active")
        with self._lock:
            if self._client is None or self._client[0] != address:
                if self._client is not None:
                    self._client[1].close()
                token = self._token or _token_in(self.folder)
                client = CoordinatorClient(address, token=token, timeout=STATUS_SECONDS)
                self._client = (address, client)
            return self._client[1]

    def memory(self) -> dict[str, int]:
        """The resident bytes of each worker's process that runs on this machine, in steps of a megabyte."""
        record, found = self.record(), dict[str, int]()
        for name, process in () if record is None else record.workers.items():
            with contextlib.suppress(psutil.Error):
                if process.is_running():
                    found[name] = psutil.Process(process.pid).memory_info().rss // 10**6 * 10**6
        return found

    def logs(self) -> dict[str, Path]:
        """The log file of each process that has one, by the name of the process."""
        if self.folder is None:
            return {}
        return {path.stem: path for path in sorted((self.folder / LOGS_FOLDER).glob("*.log"))}

    def close(self) -> None:
        """Close the connection and end the thread that reads metrics."""
        self.metrics.close()
        with self._lock:
            if self._client is not None:
                self._client[1].close()
                self._client = None

    def _is_running(self, record: RunRecord | None) -> bool:
        """Whether the launcher of the record runs; one that has ended is not looked up again."""
        if record is None or record is self._ended_record:
            return False
        is_running = record.launcher.is_running()
        self._ended_record = None if is_running else record
        return is_running

    def _last_line(self) -> MetricsLine | None:
        if self.folder is None:
            return None
        try:
            facts = os.stat(self._metrics_file)  # noqa: PTH116  see above
        except OSError:
            return None
        stamp = (facts.st_size, facts.st_mtime_ns)
        if stamp != self._last[0]:
            self._last = (stamp, self.metrics.last())
        return self._last[1]

    def _summary_of_coordinator(self) -> RunSummary:
        try:
            return self._summary(self.client().status())
        except TensorForgeError:
            return self._summary(None)

    def _summary(self, view: ClusterView | None) -> RunSummary:
        loss = None
        if view is not None:
            losses = (w.metrics.get("loss") for w in view.workers if w.rank >= 0)
            loss = next((value for value in losses if value is not None), None)
        return RunSummary(
            run_id=self.run_id,
            script=self._address or "",
            state=UNREACHABLE if view is None else ENDED if view.ended is not None else RUNNING,
            workers=0 if view is None else sum(1 for w in view.workers if w.rank >= 0),
            step=None if view is None or view.state.step < 0 else view.state.step,
            loss=loss,
            updated=time.time(),
        )

    def _durable(self) -> DurableState | None:
        """What the journal adds up to, for a run whose coordinator has ended."""
        if self.folder is None or not (self.folder / JOURNAL_FILE).exists():
            return None
        path = self.folder / JOURNAL_FILE
        modified = max(_modified(path), _modified(path.with_name(f"{path.name}-wal")))
        if modified != self._journal[0]:
            state = None
            with (
                contextlib.suppress(TensorForgeError, OSError),
                contextlib.closing(Database(path)) as database,
            ):
                state = replay(Journal(database).entries())
            self._journal = (modified, state)
        return self._journal[1]


@dataclass(frozen=True, slots=True)
class RunSources:
    """All runs below some folders, and some coordinators. New runs are found when the list is asked for."""

    folders: tuple[Path, ...] = ()
    coordinators: tuple[str, ...] = ()
    token: str | None = None
    _known: dict[str, RunSource] = field(default_factory=dict)

    def all(self) -> list[RunSource]:
        """Every run, without order."""
        for run_id, folder in self._found():
            if run_id not in self._known:
                self._known[run_id] = RunSource(run_id, folder=folder, token=self.token)
        for address in self.coordinators:
            if address not in self._known:
                self._known[address] = RunSource(address, address=address, token=self.token)
        gone = [s.run_id for s in self._known.values() if s.folder and not os.path.isdir(s.folder)]  # noqa: PTH112
        for run_id in gone:
            self._known.pop(run_id).close()
        return [*self._known.values()]

    def get(self, run_id: str) -> RunSource:
        """The run with this id; `NotFoundError` if there is none."""
        found = self._known.get(run_id)
        if found is None:
            self.all()
            found = self._known.get(run_id)
        if found is None:
            raise NotFoundError(f"there is no run {run_id[:200]!r}")
        return found

    def close(self) -> None:
        """Close the connections of all runs."""
        for source in self._known.values():
            source.close()

    def _found(self) -> Iterable[tuple[str, Path]]:
        for root in self.folders:
            if _is_run(root):
                yield root.resolve().name, root
                continue
            with contextlib.suppress(OSError), os.scandir(root) as entries:
                for entry in entries:
                    if entry.name in self._known or not entry.is_dir():
                        continue
                    if _is_run(Path(entry.path)):
                        yield entry.name, Path(entry.path)


def _is_run(folder: Path) -> bool:
    return (folder / RUN_FILE).exists() or (folder / METRICS_FILE).exists()


def _modified(path: str | Path) -> int:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116  the path may be text
    except OSError:
        return 0


def _token_in(folder: Path | None) -> str | None:
    if folder is None or not (folder / TOKEN_FILE).exists():
        return None
    return read_token(folder / TOKEN_FILE)


def _loss(line: MetricsLine | None) -> float | None:
    value = None if line is None else line.metrics.get("loss")
    return float(value) if isinstance(value, int | float) else None
