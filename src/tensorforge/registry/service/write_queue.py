"""`WriteQueue`: one thread that makes the changes of all requests, several of them in one commit."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorforge.errors import ClosedError
from tensorforge.storage.database import Database

MAX_BATCH = 64
"""How many changes share a commit at most; the first of them waits for all the others."""


@dataclass(frozen=True, slots=True)
class _Change:
    """A change to make, and the future of the request that waits for it."""

    work: Callable[..., Any]
    arguments: tuple[Any, ...]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]

    def settle(self, outcome: Any, error: BaseException | None) -> None:
        if self.done.cancelled():
            return
        if error is None:
            self.done.set_result(outcome)
        else:
            self.done.set_exception(error)


class WriteQueue:
    """Makes changes one after the other, and answers each after its commit.

    The changes that are waiting when one is done join its transaction. A change that raises is undone alone,
    and only its caller gets the error. If the commit fails, every caller of the batch gets the error.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: queue.SimpleQueue[_Change | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run `work` in the queue's thread; returns its result after everything it wrote is durable."""
        loop = asyncio.get_running_loop()
        change = _Change(work, arguments, loop, loop.create_future())
        with self._lock:
            if self._closed:
                raise ClosedError("the service is closing and accepts no more changes")
            self._waiting.put(change)
            if self._thread is None:
                # A daemon, so that a queue that was not closed does not keep the interpreter from ending.
                self._thread = threading.Thread(
                    target=self._serve, name="registry-writes", daemon=True
                )
                self._thread.start()
        return await change.done

    def close(self) -> None:
        """Make the changes that are waiting, and end the thread."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while (change := self._waiting.get()) is not None:
            self._make_batch(change)

    def _make_batch(self, first: _Change) -> None:
        made: list[tuple[_Change, Any, BaseException | None]] = []
        change: _Change | None = first
        try:
            with self._database.batch():
                while change is not None:
                    made.append((change, *_attempt(change)))
                    change = self._next() if len(made) < MAX_BATCH else None
        except BaseException as error:  # noqa: BLE001  every waiting caller must get it
            made = [(change, None, error) for change, _, _ in made]
        _answer(made)

    def _next(self) -> _Change | None:
        try:
            change = self._waiting.get_nowait()
        except queue.Empty:
            return None
        if change is None:
            self._waiting.put(None)
        return change


def _attempt(change: _Change) -> tuple[Any, BaseException | None]:
    try:
        return change.work(*change.arguments), None
    except BaseException as error:  # noqa: BLE001  raised again in the caller's task
        return None, error


def _answer(made: list[tuple[_Change, Any, BaseException | None]]) -> None:
    """Answer the callers, with one wake-up per event loop."""
    for loop in {change.loop for change, _, _ in made}:
        mine = [each for each in made if each[0].loop is loop]
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
            loop.call_soon_threadsafe(_settle, mine)


def _settle(made: list[tuple[_Change, Any, BaseException | None]]) -> None:
    for change, outcome, error in made:
        change.settle(outcome, error)
