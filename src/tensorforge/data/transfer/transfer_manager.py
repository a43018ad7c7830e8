"""The execution of a redistribution plan: this worker fetches its shards while training continues."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Self

from tensorforge.capacity import RollingWindow
from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.cluster.workers import WorkerId
from tensorforge.data.plan.plan import DataRedistributionPlan, DataTransfer
from tensorforge.data.segments.packed_dataset import Origin
from tensorforge.data.segments.segment import BLOCK
from tensorforge.data.segments.shard_store import ShardStore
from tensorforge.data.transfer.chunk_buffers import BufferPool, HostBuffers
from tensorforge.data.transfer.shard_fetcher import Cancellation, ShardFetcher
from tensorforge.data.transfer.wire_protocol import Credentials
from tensorforge.errors import (
    AuthenticationError,
    CapacityError,
    ClosedError,
    ConfigurationError,
    DeadlineExceededError,
    StaleGenerationError,
    TensorForgeError,
    TransferCancelledError,
    TransferError,
)
from tensorforge.resilience import RetryPolicy, is_retryable
from tensorforge.validation import whole_number

_RATE_WINDOW_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What the execution of a plan transferred; `already_held` counts transfers that were not needed."""

    transfers: int
    samples: int
    bytes_received: int
    retries: int
    from_origin: int
    already_held: int
    seconds: float


class TransferJob:
    """The running transfers of one plan, in threads of their own; `wait` returns their report."""

    def __init__(self, moves: Iterable[DataTransfer]) -> None:
        self.cancellation = Cancellation()
        self.moves = tuple(moves)
        self.futures: dict[DataTransfer, Future[None]] = {}
        self.bytes_received = 0
        self.retries = self.from_origin = self.already_held = 0
        self.lock = threading.Lock()
        self._started = time.monotonic()

    def cancel(self) -> None:
        """Stop as soon as possible; verified blocks are kept for the next attempt."""
        self.cancellation.cancel()
        for future in self.futures.values():
            future.cancel()

    def wait_for(self, start: int, stop: int, timeout: float | None = None) -> None:
        """Wait until every transfer that brings samples of `[start, stop)` is done; raise if one failed."""
        needed = [
            future
            for move, future in self.futures.items()
            if move.shard.start_index < stop and start < move.shard.end_index
        ]
        done, missing = wait(needed, timeout)
        if missing:
            raise DeadlineExceededError(f"samples [{start}, {stop}) did not arrive in {timeout} s")
        for future in done:
            future.result()

    def wait(self, timeout: float | None = None) -> TransferReport:
        """Wait for all transfers; a `TransferError` names every one that failed, with its error.

        If they are not done after `timeout` seconds: `DeadlineExceededError`, and they continue.
        """
        if wait(self.futures.values(), timeout).not_done:
            raise DeadlineExceededError(f"the plan's transfers are not done after {timeout} s")
        failures: dict[str, Exception] = {}
        for move, future in self.futures.items():
            if future.cancelled():
                failures[str(move)] = TransferCancelledError("the transfer was cancelled")
            elif isinstance(error := future.exception(), Exception):
                failures[str(move)] = error
        if failures and self.cancellation.is_cancelled:
            raise TransferCancelledError(
                f"cancelled: {len(failures)} of {len(self.moves)} transfers are not done"
            )
        if failures:
            first = "; ".join(f"{move}: {error}" for move, error in list(failures.items())[:3])
            message = f"{len(failures)} of {len(self.moves)} transfers failed: {first}"
            raise TransferError(message, failures)
        return TransferReport(
            transfers=len(self.moves),
            samples=sum(move.shard.size for move in self.moves),
            bytes_received=self.bytes_received,
            retries=self.retries,
            from_origin=self.from_origin,
            already_held=self.already_held,
            seconds=time.monotonic() - self._started,
        )


class DataTransferManager:
    """Fetches this worker's shards of a plan, most urgent first, up to `max_concurrent_transfers` at once.

    A transfer continues where an earlier attempt ended and is retried as `retry` says. If its source
    cannot serve it, the origin does. `buffers` bounds the memory of chunks being received; senders wait while
    it is used up. If `config.use_parallel_data_transfer` is false, transfers run one after the other.
    """

    def __init__(
        self,
        max_concurrent_transfers: int = 4,
        *,
        worker: WorkerId,
        store: ShardStore,
        origin: Origin | None = None,
        generation: int = 0,
        token: str | None = None,
        config: ElasticTrainingConfig | None = None,
        retry: RetryPolicy | None = None,
        buffers: BufferPool | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        whole_number("max_concurrent_transfers", max_concurrent_transfers, least=1)
        parallel = config is None or config.use_parallel_data_transfer
        self.max_concurrent_transfers = max_concurrent_transfers if parallel else 1
        self.worker, self.generation = worker, generation
        self._retry = retry or RetryPolicy(max_attempts=5, base_delay=0.05, max_delay=2.0)
        self._fetcher = ShardFetcher(
            store=store,
            name=str(worker),
            origin=origin,
            credentials=Credentials(token),
            buffers=buffers or HostBuffers((self.max_concurrent_transfers + 1) * BLOCK),
            tls=tls,
            timeout=timeout,
        )
        self._clock = clock
        self._lock = threading.Lock()
        self._rate = RollingWindow(_RATE_WINDOW_SECONDS)
        self._busy = RollingWindow(_RATE_WINDOW_SECONDS)
        self._jobs: list[tuple[TransferJob, ThreadPoolExecutor]] = []
        self._closed = False

    def execute(self, plan: DataRedistributionPlan, timeout: float | None = None) -> TransferReport:
        """Fetch everything that `plan` assigns to this worker, and return when it has arrived."""
        return self.start(plan).wait(timeout)

    def start(self, plan: DataRedistributionPlan) -> TransferJob:
        """Begin to fetch this worker's shards and return at once.

        A plan of an older generation than this manager's is a `StaleGenerationError`. A plan of a newer one
        cancels all running transfers, and its generation becomes this manager's.
        """
        if plan.generation < self.generation:
            raise StaleGenerationError(
                f"the plan is of generation {plan.generation}; this worker is at {self.generation}"
            )
        if plan.generation > self.generation:
            self._cancel_all()  # without waiting: a source that hangs must not hold up the new group
            self.generation = plan.generation
        return self.launch(plan.transfers_to(self.worker))

    def launch(self, moves: Iterable[DataTransfer]) -> TransferJob:
        """Begin these transfers in the given order, and return at once."""
        if self._closed:
            raise ClosedError("the transfer manager was closed")
        job = TransferJob(moves)
        pool = ThreadPoolExecutor(self.max_concurrent_transfers, "shard-transfer")
        for move in job.moves:
            job.futures[move] = pool.submit(self._run, job, move)
        pool.shutdown(wait=False)  # its threads end with the last transfer
        with self._lock:
            self._jobs = [pair for pair in self._jobs if not _is_done(pair[0])]
            self._jobs.append((job, pool))
        return job

    def transfer(self, transfer: DataTransfer, *, generation: int | None = None) -> TransferReport:
        """Execute one transfer to this worker, and return when it is done."""
        if transfer.destination_worker != self.worker:
            raise ConfigurationError(
                "destination_worker",
                transfer.destination_worker,
                f"this manager is {self.worker}'s",
            )
        if generation is not None and generation < self.generation:
            raise StaleGenerationError(f"generation {generation} is older than {self.generation}")
        return self.launch([transfer]).wait()

    def samples_per_second(self) -> float | None:
        """The samples received per second of receiving, lately; `None` before any were received.

        A plan uses this rate to estimate when its transfers will be done.
        """
        with self._lock:
            now = self._clock()
            seconds = self._busy.total(now)
            return self._rate.total(now) / seconds if seconds > 0 else None

    def close(self) -> None:
        """Cancel all running transfers and wait for their threads; closing again changes nothing."""
        self._closed = True
        for pool in self._cancel_all():
            pool.shutdown(wait=True)

    def _cancel_all(self) -> list[ThreadPoolExecutor]:
        with self._lock:
            self._jobs = [pair for pair in self._jobs if not _is_done(pair[0])]
            jobs = list(self._jobs)
        for job, _ in jobs:
            job.cancel()
        return [pool for _, pool in jobs]

    def _run(self, job: TransferJob, move: DataTransfer) -> None:
        shard = move.shard
        if self._fetcher.store.held.covers(shard.start_index, shard.end_index):
            with job.lock:
                job.already_held += 1
            return
        started = self._clock()
        self._fetch(job, move)
        now = self._clock()
        with self._lock:
            self._rate.add(shard.size, now)
            self._busy.add((now - started) / self.max_concurrent_transfers, now)

    def _fetch(self, job: TransferJob, move: DataTransfer) -> None:
        generation = self.generation

        def progress(count: int) -> None:
            with job.lock:
                job.bytes_received += count

        source = move.source_worker
        if source is not None:
            try:
                return self._retried(
                    job,
                    lambda: self._fetcher.from_peer(
                        source, move.shard, generation, job.cancellation, progress
                    ),
                )
            except (
                TransferCancelledError,
                StaleGenerationError,
                AuthenticationError,
                CapacityError,
            ):
                raise  # no other source could help
            except TensorForgeError:
                if self._fetcher.origin is None:
                    raise
        with job.lock:
            job.from_origin += 1
        return self._retried(
            job, lambda: self._fetcher.from_origin(move.shard, job.cancellation, progress)
        )

    def _retried(self, job: TransferJob, attempt: Callable[[], None]) -> None:
        def counted() -> None:
            job.cancellation.check()
            try:
                attempt()
            except TensorForgeError as error:
                if is_retryable(error):
                    with job.lock:
                        job.retries += 1
                raise

        self._retry.run(counted, sleep=job.cancellation.wait, clock=self._clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_done(job: TransferJob) -> bool:
    return all(future.done() for future in job.futures.values())
