"""Live updates by server-sent events: a part of a page is rendered once, however many people watch it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

INTERVAL_SECONDS = 0.5
KEEP_ALIVE_SECONDS = 15.0
_QUEUED = 8

Fragments = Mapping[str, str]


class Broadcast:
    """Sends the fragments of one page to all who watch it.

    `produce` returns the HTML of each fragment by the id of its element; it may block. It runs only while
    somebody watches, every `interval` seconds, and only fragments that have changed are sent.
    """

    def __init__(
        self, produce: Callable[[], Fragments], interval: float = INTERVAL_SECONDS
    ) -> None:
        self._produce = produce
        self._interval = interval
        self._queues: set[asyncio.Queue[bytes]] = set()
        self._current: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def watchers(self) -> int:
        """How many connections are open."""
        return len(self._queues)

    async def stream(self) -> AsyncIterator[bytes]:
        """The events for one connection: all fragments first, then those that change."""
        queue: asyncio.Queue[bytes] = asyncio.Queue(_QUEUED)
        self._queues.add(queue)
        if self._task is None:
            self._current = {}
            self._task = asyncio.create_task(self._run())
        elif self._current:
            queue.put_nowait(_message(self._current))
        try:
            yield b"retry: 1000\n\n"
            while True:
                try:
                    yield await asyncio.wait_for(queue.get(), KEEP_ALIVE_SECONDS)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._queues.discard(queue)
            if not self._queues and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        while True:
            fragments = dict(await run_in_threadpool(self._produce))
            changed = {n: html for n, html in fragments.items() if self._current.get(n) != html}
            self._current = fragments
            if changed:
                self._send(_message(changed))
            await asyncio.sleep(self._interval)

    def _send(self, message: bytes) -> None:
        for queue in self._queues:
            if queue.full():  # a slow connection gets the newest state instead of every change
                while not queue.empty():
                    queue.get_nowait()
                message = _message(self._current)
            queue.put_nowait(message)


def event_stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    """The response that carries the events."""
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


def _message(fragments: Fragments) -> bytes:
    return f"data: {json.dumps(dict(fragments))}\n\n".encode()
