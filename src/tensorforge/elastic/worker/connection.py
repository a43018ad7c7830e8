"""A worker's stream to the coordinator: connects, receives, sends, and reconnects by itself.

There are two threads. The stream thread reads the coordinator's messages; when the stream breaks, it opens
a new one after a growing, jittered pause, without a limit. The heartbeat thread sends a heartbeat and the
newest progress once per interval, so that neither a fast training loop nor a slow network can build a
queue.

gRPC's native threads answer the pings of the connection without Python's interpreter lock. So a step that keeps
the lock for minutes does not look like a dead process, and a frozen process does.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Callable
from typing import Any

import grpc

from tensorforge.elastic.protocol import commands, messages
from tensorforge.elastic.protocol.access import TlsOptions, call_metadata, open_channel
from tensorforge.elastic.protocol.status_codes import translate
from tensorforge.elastic.protocol.timeouts import RECONNECT_LEAST, RECONNECT_MOST, Timeouts
from tensorforge.errors import EncodingError, TensorForgeError

log = logging.getLogger(__name__)

_JOIN_TIMEOUT = 10.0


class Connection:
    """Keeps a stream to the coordinator open.

    `hello` makes the first message of each stream, `beat` the messages of each interval. On the stream
    thread, `receive` is called with every message, and `lost` when a stream breaks: with an error if no
    other stream will be opened. `timeouts` may be set at any time; pings follow with the next stream.
    """

    def __init__(
        self,
        address: str,
        timeouts: Timeouts,
        *,
        hello: Callable[[], messages.Hello],
        receive: Callable[[messages.FromCoordinator], None],
        lost: Callable[[TensorForgeError | None], None],
        beat: Callable[[], list[messages.FromWorker]],
        token: str | None = None,
        tls: TlsOptions | None = None,
    ) -> None:
        self._address = address
        self.timeouts = timeouts
        self._hello, self._receive, self._lost, self._beat = hello, receive, lost, beat
        self._metadata = call_metadata(token)
        self._tls = tls
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[bytes | None] | None = None
        self._call: Any = None
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._again = False
        # A stream of its own: the training thread seeds the process-wide one and draws from it meanwhile.
        self._jitter = random.Random()  # noqa: S311  spreads reconnections, guards nothing
        self._threads = [
            threading.Thread(target=self._keep_open, name="tensorforge-stream", daemon=True),
            threading.Thread(target=self._keep_alive, name="tensorforge-heartbeat", daemon=True),
        ]

    def start(self) -> None:
        """Start both threads; returns before there is a stream."""
        for thread in self._threads:
            thread.start()

    def send(self, message: messages.FromWorker) -> bool:
        """Send a message on the present stream; `False` if there is none."""
        with self._lock:
            if self._outbox is None:
                return False
            self._outbox.put(messages.to_bytes(message))
            return True

    def wake(self) -> None:
        """Let the heartbeat thread send now instead of at the end of its interval."""
        self._wake.set()

    def restart_stream(self) -> None:
        """Replace the stream without a pause: the worker has a new incarnation."""
        self._again = True
        self._break_stream()

    def retire(self) -> None:
        """Open no other stream after the present one."""
        self._stopping.set()
        self._wake.set()

    def close(self) -> None:
        """End the stream and both threads; a second call does nothing."""
        self.retire()
        self._break_stream()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(_JOIN_TIMEOUT)

    def _break_stream(self) -> None:
        with self._lock:
            call, outbox = self._call, self._outbox
            self._outbox = None
        if outbox is not None:
            outbox.put(None)
        if call is not None:
            call.cancel()

    def _keep_open(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            self._again = False
            had_answer, problem = self._one_stream()
            if self._stopping.is_set():
                return
            if problem is not None and not problem.retryable:
                self._lost(problem)
                return
            failures = 0 if had_answer else failures + 1
            if not self._again:
                self._lost(None)
                most = min(RECONNECT_MOST, RECONNECT_LEAST * 2 ** min(failures, 20))
                self._stopping.wait(self._jitter.uniform(RECONNECT_LEAST / 2, most))

    def _one_stream(self) -> tuple[bool, TensorForgeError | None]:
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        outbox.put(messages.to_bytes(self._hello()))
        had_answer = False
        try:
            channel = open_channel(self._address, self._tls, _channel_options(self.timeouts))
        except TensorForgeError as error:
            return False, error
        try:
            method = channel.stream_stream(f"/{commands.SERVICE}/Join")
            call = method(iter(outbox.get, None), metadata=self._metadata)
            with self._lock:
                self._call, self._outbox = call, outbox
            if self._stopping.is_set():
                return False, None
            for data in call:
                had_answer = True
                self._receive(messages.from_coordinator(data))
            return had_answer, None
        except grpc.RpcError as error:
            return had_answer, translate(error, self._address)
        except EncodingError as error:
            log.warning(
                "cannot decode a message of the coordinator at %s: %s", self._address, error
            )
            return had_answer, error
        finally:
            self._break_stream()
            channel.close()

    def _keep_alive(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self.timeouts.heartbeat)
            self._wake.clear()
            if self._stopping.is_set():
                return
            for message in self._beat():
                self.send(message)


def _channel_options(timeouts: Timeouts) -> list[tuple[str, int]]:
    return [
        *timeouts.ping_options(),
        # How long one attempt to connect may take; the default of 20 s outlasts most network cuts.
        ("grpc.min_reconnect_backoff_ms", max(1000, round(timeouts.silence * 1000))),
        ("grpc.max_receive_message_length", -1),
    ]
