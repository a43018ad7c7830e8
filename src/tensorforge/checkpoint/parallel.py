"""Threads of a save or load: tasks that stop together, a deadline, a count of bytes, work in the background."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from tensorforge.checkpoint.options import Progress
from tensorforge.errors import ConflictError, DeadlineExceededError

Context = TypeVar("Context")
Result = TypeVar("Result")

NO_TIMEOUT = 1e9
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 1.0


class CancelledError(ConflictError):
    """The caller cancelled the operation."""


class Deadline:
    """Says when an operation must stop: `timeout` seconds after its start, or when `cancel` is set."""

    def __init__(
        self,
        timeout: float = NO_TIMEOUT,
        cancel: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._ends_at = clock() + timeout
        self._cancel = cancel
        self.timeout = timeout

    def check(self, what: str) -> None:
        """Raise `DeadlineExceededError` or `CancelledError` if the operation `what` must stop."""
        if self._cancel is not None and self._cancel.is_set():
            raise CancelledError(f"{what} was cancelled")
        if self._clock() > self._ends_at:
            raise DeadlineExceededError(f"{what} took longer than {self.timeout:g} seconds")

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, at least a millisecond."""
        return max(0.001, self._ends_at - self._clock())


class ByteCounter:
    """Counts bytes from several threads and reports each new sum to a callback, one call at a time."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._lock = threading.Lock()
        self._total = total
        self._progress = progress
        self._done = 0

    def add(self, count: int) -> None:
        """Count `count` more bytes."""
        with self._lock:
            self._done = min(self._total, self._done + count)
            if self._progress is not None:
                self._progress(self._done, self._total)


class BackgroundWork(Generic[Result]):
    """Runs `work` in a thread of its own and keeps its result or its error."""

    def __init__(self, what: str, work: Callable[[], Result]) -> None:
        self._what = what
        self._values: list[Result] = []
        self._error: BaseException | None = None
        self._is_raised = False
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,), name=what, daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Result]) -> None:
        try:
            self._values.append(work())
        except BaseException as error:  # noqa: BLE001  raised by `result`
            self._error = error
        finally:
            self._finished.set()

    @property
    def is_done(self) -> bool:
        """Whether the work has succeeded or failed."""
        return self._finished.is_set()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result, or raise the error of the work; `TimeoutError` after `timeout` seconds."""
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self._what} is still running after {timeout} seconds")
        self._thread.join()
        if self._error is not None:
            self._is_raised = True
            raise self._error
        return self._values[0]

    def settle(self) -> None:
        """Wait for the end; raise the error of the work unless `result` has raised it already."""
        self._finished.wait()
        self._thread.join()
        if not self._is_raised:
            self.result()


class _TaskThreads(Generic[Context]):
    """Threads that take tasks from one queue."""

    def __init__(
        self,
        tasks: Iterable[Callable[[Context], None]],
        context: Callable[[], contextlib.AbstractContextManager[Context]],
        workers: int,
    ) -> None:
        self._tasks = iter(tasks)
        self._context = context
        self._changed = threading.Condition()
        self._working = workers
        self._stopping = False
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"checkpoint-{index}", daemon=True)
            for index in range(workers)
        ]

    def run(self, deadline: Deadline, what: str) -> None:
        for thread in self._threads:
            thread.start()
        try:
            self._wait(deadline, what)
        finally:
            self._stop()
        if self._error is not None:
            raise self._error

    def _wait(self, deadline: Deadline, what: str) -> None:
        with self._changed:
            while self._working and self._error is None:
                deadline.check(what)
                self._changed.wait(min(_POLL_SECONDS, deadline.remaining))

    def _stop(self) -> None:
        with self._changed:
            self._stopping = True
        # A thread that hangs in a system call is abandoned; it owns its buffer and ends with the process.
        give_up = time.monotonic() + _GRACE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))

    def _work(self) -> None:
        try:
            self._do_tasks()
        except BaseException as error:  # noqa: BLE001  raised again by the thread that waits
            _clear_frames(error)
            self._fail(error)
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _do_tasks(self) -> None:
        with self._context() as context:
            for task in self._take():
                task(context)

    def _take(self) -> Iterator[Callable[[Context], None]]:
        while True:
            with self._changed:
                task = None if self._stopping or self._error else next(self._tasks, None)
            if task is None:
                return
            yield task

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables of an error's frames, so that keeping the error does not keep buffers."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def run_parallel(
    tasks: Iterable[Callable[[Context], None]],
    context: Callable[[], contextlib.AbstractContextManager[Context]],
    *,
    workers: int,
    deadline: Deadline,
    what: str,
) -> None:
    """Run every task on one of `workers` threads, in order, and return when all are done.

    Each thread enters `context` once and passes its value to its tasks. The first error of a task, the
    deadline and a cancellation end all threads and are raised, even if a task hangs.
    """
    deadline.check(what)
    _TaskThreads(tasks, context, max(1, workers)).run(deadline, what)
