"""The launcher's line to the coordinator: views come in as they change, wishes go out.

Both may be slow, or the coordinator away: two threads wait for that, the launcher's loop never does.
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

Wish: TypeAlias = Callable[[CoordinatorClient], ClusterView]

_RETRY_SECONDS = 0.1


def _look(client: CoordinatorClient) -> ClusterView:
    return client.status()


def _ask_for(client: CoordinatorClient, workers: int, expected: int | None) -> ClusterView:
    return client.scale(workers, "the launcher", expected=expected, requester=Requester.LAUNCHER)


@dataclass(frozen=True, slots=True)
class News:
    """A view that came by itself, or after a wish: what holds then, `None` if that cannot be told."""

    view: ClusterView | None
    answers: bool = False


class CoordinatorLink:
    """Watches one coordinator through its deaths. `on_news` is called, from a thread, after each view."""

    def __init__(self, address: str, token: str | None, on_news: Callable[[], None]) -> None:
        self._client = CoordinatorClient(address, token=token, timeout=5.0)
        self._on_news = on_news
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._wishes: queue.SimpleQueue[tuple[Wish, bool] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, name="coordinator-watch", daemon=True),
            threading.Thread(target=self._speak, name="coordinator-wishes", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def take(self) -> list[News]:
        """What came since the last call, as it came."""
        found: list[News] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._news.get_nowait())
        return found

    def set_target(self, workers: int, expected: int | None) -> None:
        """Ask for so many workers, unless somebody has since `expected`; the answer comes as news."""
        self._wishes.put((lambda client: _ask_for(client, workers, expected), True))

    def report_exit(self, worker: str, reason: str, pid: int) -> None:
        """Tell that a worker's process ended."""
        self._wishes.put((lambda client: client.report_exit(worker, reason, pid), False))

    def close(self) -> None:
        """Give the connection up; wishes that were not delivered are forgotten."""
        self._closing.set()
        self._wishes.put(None)
        self._client.close()
        for thread in self._threads:
            thread.join()

    def _watch(self) -> None:
        while not self._closing.is_set():
            # A closed channel raises ValueError; any other error means that it is away for now.
            with contextlib.suppress(TensorForgeError, ValueError):
                for view in self._client.watch():
                    self._tell(News(view))
            self._closing.wait(_RETRY_SECONDS)

    def _speak(self) -> None:
        while (asked := self._wishes.get()) is not None:
            wish, wants_answer = asked
            try:
                view = self._fulfil(wish)
            except ValueError:
                return  # the channel was closed
            if wants_answer:
                self._tell(News(view, answers=True))

    def _fulfil(self, wish: Wish) -> ClusterView | None:
        """Ask until it is heard, in order, however long the coordinator is away; what holds afterwards."""
        while not self._closing.is_set():
            try:
                return wish(self._client)
            except TensorForgeError as error:
                if not error.retryable and wish is _look:
                    return None
                if not error.retryable:
                    wish = _look  # it was refused: what holds instead?
            self._closing.wait(_RETRY_SECONDS)
        return None

    def _tell(self, news: News) -> None:
        self._news.put(news)
        self._on_news()
