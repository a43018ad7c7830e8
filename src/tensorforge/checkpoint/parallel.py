"""Work on several threads that stops at once: on the first error, at the deadline, or when cancelled."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from tensorforge.errors import ConflictError, DeadlineExceededError

Context = TypeVar("Context")

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 1.0


class CancelledError(ConflictError):
    """The caller asked to stop."""


class Guard:
    """A deadline and a request to stop, in one: ask `check` often, wait no longer than `remaining`."""

    def __init__(
        self,
        timeout: float,
        cancel: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._deadline = clock() + timeout
        self._cancel = cancel
        self.timeout = timeout

    def check(self, what: str = "it") -> None:
        """Raise if time is up or somebody asked to stop."""
        if self._cancel is not None and self._cancel.is_set():
            raise CancelledError(f"{what} was cancelled")
        if self._clock() > self._deadline:
            raise DeadlineExceededError(f"{what} took longer than {self.timeout:g} seconds")

    @property
    def remaining(self) -> float:
        """Seconds left, never below a small positive number."""
        return max(0.001, self._deadline - self._clock())


class _Crew(Generic[Context]):
    """Threads that take tasks from one queue."""

    def __init__(
        self,
        tasks: Iterable[Callable[[Context], None]],
        workplace: Callable[[], contextlib.AbstractContextManager[Context]],
        workers: int,
    ) -> None:
        self._tasks = iter(tasks)
        self._workplace = workplace
        self._changed = threading.Condition()
        self._working = workers
        self._stopping = False
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"checkpoint-{index}", daemon=True)
            for index in range(workers)
        ]

    def run(self, guard: Guard, what: str) -> None:
        for thread in self._threads:
            thread.start()
        try:
            self._wait(guard, what)
        finally:
            self._stop()
        if self._error is not None:
            raise self._error

    def _wait(self, guard: Guard, what: str) -> None:
        with self._changed:
            while self._working and self._error is None:
                guard.check(what)
                self._changed.wait(min(_POLL_SECONDS, guard.remaining))

    def _stop(self) -> None:
        with self._changed:
            self._stopping = True
        # A thread that hangs in a system call is left behind; it owns its buffer and dies with the process.
        give_up = time.monotonic() + _GRACE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))

    def _work(self) -> None:
        try:
            self._do_tasks()
        except BaseException as error:  # noqa: BLE001  raised again by the thread that waits
            _let_go_of_locals(error)
            self._fail(error)
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _do_tasks(self) -> None:
        with self._workplace() as context:
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


def _let_go_of_locals(error: BaseException) -> None:
    """An error that somebody keeps must not keep the buffer that its thread was working on."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def run_parallel(
    tasks: Iterable[Callable[[Context], None]],
    workplace: Callable[[], contextlib.AbstractContextManager[Context]],
    *,
    workers: int,
    guard: Guard,
    what: str,
) -> None:
    """Run every task, each with the context of the thread that runs it.

    `workplace` is entered once per thread. The first error ends everything and is raised; so do the guard's
    deadline and cancellation, even if a task hangs. Tasks are taken in order.
    """
    guard.check(what)
    _Crew(tasks, workplace, max(1, workers)).run(guard, what)
