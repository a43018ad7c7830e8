"""The launcher's line to the coordinator: views come in as they change, wishes go out.

Both may be slow, or the coordinator away: two threads wait for that, the launcher's loop never does.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

from tensorforge.elastic.client import CoordinatorClient
from tensorforge.elastic.view import ClusterView
from tensorforge.errors import TensorForgeError

Wish: TypeAlias = Callable[[CoordinatorClient], object]

_RETRY_SECONDS = 0.1
_ATTEMPTS = 300


class CoordinatorLink:
    """Watches one coordinator through its deaths. `on_news` is called, from a thread, after each view."""

    def __init__(self, address: str, token: str | None, on_news: Callable[[], None]) -> None:
        self._client = CoordinatorClient(address, token=token, timeout=5.0)
        self._on_news = on_news
        self._views: queue.SimpleQueue[ClusterView] = queue.SimpleQueue()
        self._wishes: queue.SimpleQueue[Wish | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, name="coordinator-watch", daemon=True),
            threading.Thread(target=self._speak, name="coordinator-wishes", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def take(self) -> list[ClusterView]:
        """The views that came since the last call, oldest first."""
        found: list[ClusterView] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._views.get_nowait())
        return found

    def wish(self, wish: Wish) -> None:
        """Have something asked of the coordinator, as soon as it can be reached, in order."""
        self._wishes.put(wish)

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
                    self._views.put(view)
                    self._on_news()
            self._closing.wait(_RETRY_SECONDS)

    def _speak(self) -> None:
        while (wish := self._wishes.get()) is not None and not self._closing.is_set():
            for _ in range(_ATTEMPTS):
                try:
                    wish(self._client)
                    break
                except TensorForgeError as error:
                    if not error.retryable:
                        break  # it was heard and refused: the next view shows what holds instead
                except ValueError:
                    return
                if self._closing.wait(_RETRY_SECONDS):
                    return
