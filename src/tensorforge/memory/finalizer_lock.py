"""A lock that is safe to use from finalizers.

Python may run a finalizer at any allocation, also in a thread that already holds the lock that the finalizer
needs; acquiring it there would deadlock. So a finalizer only queues its action with `later`. The holder of the
lock runs queued actions when it acquires the lock, or at the latest when it releases it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

_log = logging.getLogger(__name__)


class FinalizerLock:
    """A lock for `with` blocks that is not re-entrant, with `later` for actions of finalizers."""

    __slots__ = ("_lock", "_queue")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], object]] = deque()

    def later(self, action: Callable[[], object]) -> None:
        """Run `action` under the lock: now if the lock is free, otherwise when it is next released.

        Never waits. Safe inside finalizers, and while this thread holds the lock.
        """
        self._queue.append(action)
        self._run_queue_if_free()

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._queue:
            try:
                self._run_queue()
            except BaseException:
                self._lock.release()
                raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if self._queue:
            self._run_queue_if_free()

    def _run_queue_if_free(self) -> None:
        # A holder releases before it looks at the queue, and a finalizer appends before it tries to
        # lock; so at least one of the two runs the action.
        while self._queue and self._lock.acquire(blocking=False):
            try:
                self._run_queue()
            finally:
                self._lock.release()

    def _run_queue(self) -> None:
        while self._queue:
            try:
                self._queue.popleft()()
            except Exception:  # noqa: BLE001  it must not reach an unrelated caller
                _log.exception("an action queued by a finalizer failed")
