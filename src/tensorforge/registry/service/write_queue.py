"""The one thread that makes the changes of all requests, those that wait together in one commit."""

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

MOST = 64
"""So many changes at most share a commit: the first of them waits for all the others."""


@dataclass(frozen=True, slots=True)
class _Change:
    """Something to do, and who waits for it."""

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


class Writer:
    """Makes changes one after the other; nobody is answered before the change is durable.

    Whatever waits when a change is done joins its transaction. A change that raises is undone alone, and only
    whoever asked for it hears of it; if the commit fails, everybody does.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: queue.SimpleQueue[_Change | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What `work` returns, once everything that it wrote through the database is durable."""
        loop = asyncio.get_running_loop()
        change = _Change(work, arguments, loop, loop.create_future())
        with self._lock:
            if self._closed:
                raise ClosedError("the service is closing and takes no more changes")
            self._waiting.put(change)
            if self._thread is None:
                # A daemon: whoever is not closed must not keep the interpreter from ending.
                self._thread = threading.Thread(
                    target=self._serve, name="registry-writer", daemon=True
                )
                self._thread.start()
        return await change.done

    def close(self) -> None:
        """Make what waits, and end the thread."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while (change := self._waiting.get()) is not None:
            self._make(change)

    def _make(self, first: _Change) -> None:
        made: list[tuple[_Change, Any, BaseException | None]] = []
        change: _Change | None = first
        try:
            with self._database.batch():
                while change is not None:
                    made.append((change, *_attempt(change)))
                    change = self._next() if len(made) < MOST else None
        except BaseException as error:  # noqa: BLE001  whatever it is, those who wait must hear of it
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
    except BaseException as error:  # noqa: BLE001  raised again where it is waited for
        return None, error


def _answer(made: list[tuple[_Change, Any, BaseException | None]]) -> None:
    """Wake each event loop once, however many of its changes were made."""
    for loop in {change.loop for change, _, _ in made}:
        mine = [each for each in made if each[0].loop is loop]
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, mine)


def _settle(made: list[tuple[_Change, Any, BaseException | None]]) -> None:
    for change, outcome, error in made:
        change.settle(outcome, error)
