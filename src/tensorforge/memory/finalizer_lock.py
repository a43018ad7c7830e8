"""A lock that finalizers can live with.

Python may run a finalizer at any allocation, so also in a thread that holds the very lock that the
finalizer wants: taking it there would wait for ever. A finalizer therefore only queues its work with
`later`; whoever holds the lock does it before anything else, or at the latest when letting go.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

_log = logging.getLogger(__name__)


class Guard:
    """`with guard:` excludes other threads. It is not re-entrant."""

    __slots__ = ("_lock", "_queue")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], object]] = deque()

    def later(self, action: Callable[[], object]) -> None:
        """Run `action` under the lock: now if nobody holds it, otherwise when it is next let go.

        Never waits, and is safe inside finalizers and while this thread holds the lock.
        """
        self._queue.append(action)
        self._settle()

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._queue:
            try:
                self._run_queue()
            except BaseException:
                self._lock.release()
                raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()
        if self._queue:
            self._settle()

    def _settle(self) -> None:
        # Release comes before the look at the queue, and appending before the attempt to lock: so of a
        # holder that lets go and a finalizer that queues, at least one sees the other.
        while self._queue and self._lock.acquire(blocking=False):
            try:
                self._run_queue()
            finally:
                self._lock.release()

    def _run_queue(self) -> None:
        while self._queue:
            try:
                self._queue.popleft()()
            except Exception:  # noqa: BLE001  nobody waits for it; a bystander must not get its error
                _log.exception("an action queued by a finalizer failed")
