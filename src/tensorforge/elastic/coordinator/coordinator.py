"""The coordinator as one object, which runs in a thread of the calling process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.elastic.coordinator.control_server import ControlServer
from tensorforge.elastic.coordinator.coordinator_metrics import MetricsServer
from tensorforge.elastic.coordinator.journal import Journal
from tensorforge.elastic.coordinator.journal_records import (
    DurableState,
    RunResumed,
    Seat,
)
from tensorforge.elastic.coordinator.machine.cluster_state import ClusterState
from tensorforge.elastic.coordinator.machine.instructions import Note
from tensorforge.elastic.coordinator.machine.machine import Machine
from tensorforge.elastic.protocol import commands
from tensorforge.elastic.protocol.access import Authorizer, TlsOptions
from tensorforge.elastic.protocol.cluster_view import ClusterView
from tensorforge.elastic.protocol.messages import Ended
from tensorforge.errors import (
    ClosedError,
    ConfigurationError,
    ConflictError,
    DeadlineExceededError,
    TensorForgeError,
)
from tensorforge.security import TokenStore
from tensorforge.storage.database import IN_MEMORY, Database

Result = TypeVar("Result")

log = logging.getLogger(__name__)

START_TIMEOUT = 60.0
_LEASE_POLL = 0.1


class ElasticCoordinator:
    """Membership, generations, rescales and training state of one run, served over gRPC.

    `database` has the journal (a `Database`, a URL or a path; in memory by default, which survives no
    restart). A run that has ended stays ended on its journal unless `resume` is set. With `resume`, the run
    also goes on with new workers if `is_gone` returns true for every member in the journal: then an earlier
    launch has ended, and its workers did not fail. `desired_workers` is how many workers a launcher will
    start; the first generation forms as soon as that many have joined. `tokens` are required unless `host`
    is loopback. `metrics_port` serves Prometheus metrics and `/healthz` (0 picks a port).

    If one of its tasks fails, the coordinator steps down: it stops serving and releases the lease, and
    `require_running` and `wait_until_ended` raise the error, so that its process can exit and be replaced.

    After `start` the coordinator serves at `address`. While another coordinator leads the run, `start`
    waits up to `lease_wait` seconds for that lease to end, then raises `ConflictError`. All methods may be
    called from any thread. As a context manager, it starts and closes itself.
    """

    def __init__(
        self,
        config: ElasticTrainingConfig | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        database: Database | str | Path = IN_MEMORY,
        run_id: str = "default",
        desired_workers: int | None = None,
        tokens: TokenStore | None = None,
        tls: TlsOptions | None = None,
        metrics_port: int | None = None,
        resume: bool = False,
        is_gone: Callable[[Seat], bool] | None = None,
        lease_seconds: float = 10.0,
        lease_wait: float = 0.0,
        on_note: Callable[[Note], None] | None = None,
    ) -> None:
        self.config = config or ElasticTrainingConfig()
        if not 0 <= port < 1 << 16:
            raise ConfigurationError("port", port, "must be 0 to 65535")
        self._host, self._port = host, port
        self._authorizer = Authorizer(tokens, host=host)
        self._tls = tls
        self._database = database if isinstance(database, Database) else Database(database)
        self._owns_database = not isinstance(database, Database)
        self._run_id = run_id
        self._desired_workers = desired_workers
        self._metrics_port = metrics_port
        self._resume = resume
        self._is_gone = is_gone
        self._lease_seconds = lease_seconds
        self._lease_wait = lease_wait
        self._on_note = on_note
        self._service: ControlServer | None = None
        self._metrics: MetricsServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._outcome: Ended | None = None
        self._leaving: asyncio.Event | None = None

    # Starting and stopping

    def start(self) -> Self:
        """Take the lease, replay the journal and serve. Returns once workers can connect."""
        if self._thread is not None:
            raise ConflictError("this coordinator was already started")
        self._thread = threading.Thread(target=self._run, name="tensorforge-coordinator")
        self._thread.start()
        self._started.wait(START_TIMEOUT + self._lease_wait)
        if self._error is not None:
            error = self._error
            self.close()
            raise error
        if not self._started.is_set():
            self.close()
            raise DeadlineExceededError(f"the coordinator did not start within {START_TIMEOUT} s")
        return self

    def close(self) -> None:
        """Stop serving and release the lease. Workers keep training until another coordinator starts."""
        if self._loop is not None and self._leaving is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._leaving.set)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._owns_database:
            self._database.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001  the thread that called `start` raises it
            # The frames refer to the gRPC server, whose threads end with its last reference.
            traceback.clear_frames(error.__traceback__)
            self._error = error
        finally:
            self._started.set()
            self._over.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._leaving = asyncio.Event()
        journal = Journal(self._database, self._run_id, lease_seconds=self._lease_seconds)
        restored = await self._take_lease(journal)
        now = time.monotonic()
        state = ClusterState(
            self.config,
            now=now,
            desired_workers=self._desired_workers,
            restored=restored,
            utc_origin=time.time() - now,
        )
        service = ControlServer(Machine(state), journal, self._authorizer, on_note=self._on_note)
        try:
            self._port = await service.start(self._host, self._port, self._tls)
            self._service = service
            if self._metrics_port is not None:
                self._metrics = MetricsServer(self._host, self._metrics_port, self)
            self._started.set()
            await self._until_over(service)
        finally:
            if self._metrics is not None:
                await asyncio.to_thread(self._metrics.close)
            self._outcome = service.view(history=0).ended
            await service.stop()
            self._service = None  # gRPC's threads end with the last reference to its server

    async def _take_lease(self, journal: Journal) -> DurableState:
        deadline = time.monotonic() + self._lease_wait
        while True:
            try:
                state = await asyncio.to_thread(journal.open)
                break
            except ConflictError:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(_LEASE_POLL)
        if self._resume and (state.ended is not None or self._nobody_is_left(state)):
            await asyncio.to_thread(journal.append, [RunResumed(reason="started again")])
            state = await asyncio.to_thread(journal.open)
        return state

    def _nobody_is_left(self, state: DurableState) -> bool:
        """Whether every process that may be training, as far as the journal tells, is known to have ended."""
        seats = {*state.seats, *(seat for group in state.open_groups for seat in group.seats)}
        return bool(seats) and self._is_gone is not None and all(map(self._is_gone, seats))

    async def _until_over(self, service: ControlServer) -> None:
        assert self._leaving is not None  # noqa: S101  set a few lines above, for the type checker
        leaving = asyncio.create_task(self._leaving.wait())
        either: set[asyncio.Future[Any]] = {leaving, service.over}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if service.over.done():
                service.over.result()
                self._outcome = service.view().ended
                self._over.set()
                # Keep serving until `close`, so that late workers are told that the run is over.
                await leaving
        finally:
            leaving.cancel()

    # Use

    @property
    def address(self) -> str:
        """The `host:port` at which workers connect."""
        return f"{self._host}:{self._port}"

    @property
    def metrics_address(self) -> str | None:
        """The `host:port` that serves `/metrics`; `None` without metrics."""
        return None if self._metrics is None else self._metrics.address

    @property
    def outcome(self) -> Ended | None:
        """How the run ended; `None` before."""
        return self._outcome

    def status(self, history: int = 20) -> ClusterView:
        """The cluster at this moment."""

        async def take() -> ClusterView:
            return self._serving().view(history)

        return self._call(take())

    def scale(self, workers: int, by: str = "the program") -> None:
        """Ask for this many workers: surplus members leave, launchers start those that are missing."""
        self._call(self._serving().perform(commands.Scale(workers, by)))

    def remove(self, worker_id: str, by: str = "the program") -> None:
        """Let a worker leave after its step."""
        self._call(self._serving().perform(commands.Remove(worker_id, by)))

    def stop_run(self, reason: str, by: str = "the program") -> None:
        """End the run for all workers, with an emergency checkpoint."""
        self._call(self._serving().perform(commands.Stop(reason, by)))

    def wait_until_ended(self, timeout: float | None = None) -> Ended | None:
        """Wait for the end of the run; `None` if it took longer than `timeout`.

        Raises `StaleGenerationError` if another coordinator took the lease.
        """
        self._over.wait(timeout)
        if self._error is not None:
            raise self._error
        return self._outcome

    def require_running(self) -> None:
        """Raise the error by which the coordinator stepped down, if it did."""
        if self._error is not None:
            raise self._error

    def seconds_since_decision(self) -> float:
        """How long ago the coordinator last handled an input; heartbeats alone keep it below a second or two.

        Raises `ClosedError` if the coordinator does not run. It may be called while the event loop is stuck.
        """
        return time.monotonic() - self._serving().decided_at

    def counters(self) -> tuple[int, int]:
        """How many heartbeats were received, and how many streams are open."""
        service = self._serving()
        return service.heartbeats, service.streams

    def _serving(self) -> ControlServer:
        if self._service is None or self._loop is None:
            raise ClosedError("the coordinator is not running")
        return self._service

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._loop is None or self._loop.is_closed() or not self._loop.is_running():
            work.close()
            raise ClosedError("the coordinator is not running")
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_TIMEOUT)
        except concurrent.futures.CancelledError as error:
            raise ClosedError("the coordinator stopped before it answered") from error
        except TimeoutError as error:
            if isinstance(error, TensorForgeError):
                raise
            raise DeadlineExceededError("the coordinator did not answer") from error
