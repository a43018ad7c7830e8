"""A TCP proxy that simulates a network partition.

While it is cut, the proxy neither forwards nor refuses bytes and accepts no connections. To both sides this
looks like a broken network, not like a dead process.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import Self

_CHUNK = 65_536


class Proxy:
    """Forwards a local port to `target` until it is cut or closed."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_open = threading.Event()
        self._is_open.set()
        self._closing = threading.Event()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._forward, name="proxy")
        self._thread.start()

    def cut(self) -> None:
        """Stop forwarding and accepting."""
        self._is_open.clear()

    def heal(self) -> None:
        """Forward again, and close the connections from before the cut."""
        self._is_open.set()

    def close(self) -> None:
        """Close all connections and end the thread."""
        self._closing.set()
        self._is_open.set()
        self._thread.join()
        for each in (self._listener, *self._pairs):
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forward(self) -> None:
        was_cut = False
        while not self._closing.is_set():
            if not self._is_open.wait(0.02):
                was_cut = True
                continue
            if was_cut:
                was_cut = False
                for each in list(self._pairs):
                    self._drop(each)
            readable, _, _ = select.select([self._listener, *self._pairs], [], [], 0.02)
            for source in readable:
                if source is self._listener:
                    self._accept()
                elif source in self._pairs:
                    self._pass_on(source)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(self._target, timeout=5)
        except OSError:
            client.close()
            return
        self._pairs[client], self._pairs[server] = server, client

    def _pass_on(self, source: socket.socket) -> None:
        try:
            data = source.recv(_CHUNK)
            if not data:
                raise OSError
            self._pairs[source].sendall(data)
        except OSError:
            self._drop(source)

    def _drop(self, source: socket.socket) -> None:
        other = self._pairs.pop(source, None)
        if other is not None:
            self._pairs.pop(other, None)
            with contextlib.suppress(OSError):
                other.close()
        source.close()
