"""The launcher's connection to the coordinator: views arrive as they change, requests are sent in order.

The coordinator may be slow or down. Two threads wait for it, so that the launcher's loop never does.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tensorforge.elastic.client import CoordinatorClient
from tensorforge.elastic.protocol.cluster_view import ClusterView
from tensorforge.elastic.protocol.reasons import Requester
from tensorforge.errors import TensorForgeError

Request: TypeAlias = Callable[[CoordinatorClient], ClusterView]

_RETRY_SECONDS = 0.1


def _fetch_status(client: CoordinatorClient) -> ClusterView:
    return client.status()


def _set_target(client: CoordinatorClient, workers: int, expected: int | None) -> ClusterView:
    return client.scale(workers, "the launcher", expected=expected, requester=Requester.LAUNCHER)


@dataclass(frozen=True, slots=True)
class ViewUpdate:
    """A view from the stream, or (`answers`) the view after a request; `None` if that is unknown."""

    view: ClusterView | None
    answers: bool = False


class CoordinatorLink:
    """Follows one coordinator through its restarts. `on_update` is called, from a thread, after each view."""

    def __init__(self, address: str, token: str | None, on_update: Callable[[], None]) -> None:
        self._client = CoordinatorClient(address, token=token, timeout=5.0)
        self._on_update = on_update
        self._updates: queue.SimpleQueue[ViewUpdate] = queue.SimpleQueue()
        self._requests: queue.SimpleQueue[tuple[Request, bool] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, name="coordinator-watch", daemon=True),
            threading.Thread(target=self._send_requests, name="coordinator-requests", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def take_updates(self) -> list[ViewUpdate]:
        """The updates since the last call, in the order of their arrival."""
        found: list[ViewUpdate] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._updates.get_nowait())
        return found

    def set_target(self, workers: int, expected: int | None) -> None:
        """Request this many workers if the target's version is `expected`; an update will answer."""
        self._requests.put((lambda client: _set_target(client, workers, expected), True))

    def report_exit(self, worker: str, reason: str, pid: int) -> None:
        """Report that a worker's process exited."""
        self._requests.put((lambda client: client.report_exit(worker, reason, pid), False))

    def close(self) -> None:
        """Close the connection; requests that were not sent are dropped."""
        self._closing.set()
        self._requests.put(None)
        self._client.close()
        for thread in self._threads:
            thread.join()

    def _watch(self) -> None:
        while not self._closing.is_set():
            # A closed channel raises ValueError; any other error means that the coordinator is down.
            with contextlib.suppress(TensorForgeError, ValueError):
                for view in self._client.watch():
                    self._publish(ViewUpdate(view))
            self._closing.wait(_RETRY_SECONDS)

    def _send_requests(self) -> None:
        while (queued := self._requests.get()) is not None:
            request, wants_answer = queued
            try:
                view = self._send(request)
            except ValueError:
                return  # the channel was closed
            if wants_answer:
                self._publish(ViewUpdate(view, answers=True))

    def _send(self, request: Request) -> ClusterView | None:
        """Repeat the request until the coordinator answers; return the view after it.

        If the coordinator refuses the request, return the current view instead.
        """
        while not self._closing.is_set():
            try:
                return request(self._client)
            except TensorForgeError as error:
                if not error.retryable and request is _fetch_status:
                    return None
                if not error.retryable:
                    request = _fetch_status
            self._closing.wait(_RETRY_SECONDS)
        return None

    def _publish(self, update: ViewUpdate) -> None:
        self._updates.put(update)
        self._on_update()
