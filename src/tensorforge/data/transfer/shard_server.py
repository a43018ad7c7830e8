"""The server side of a transfer: a worker serves its stored shards to peers of its generation."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Final, Self

from tensorforge.data.segments.range_stream import RangeStream
from tensorforge.data.segments.segment import BLOCK, checksum_of_checksums
from tensorforge.data.segments.shard_store import ShardStore
from tensorforge.data.transfer.wire_protocol import (
    CHUNK_HEADER,
    NONCE_BYTES,
    NOT_TLS,
    PREAMBLE,
    PROTOCOL,
    TLS_ALERT,
    VERSION,
    Connection,
    Credentials,
    Greeting,
    ShardReply,
    ShardRequest,
    shut_down,
)
from tensorforge.errors import (
    ClosedError,
    ConfigurationError,
    InvalidInputError,
    StaleGenerationError,
    TensorForgeError,
    UnavailableError,
)

_MAX_UNREAD_PIECES: Final = 16
_SECONDS_FOR_TOKEN: Final = 0.5
"""A connection that shows no token for so long is ended as soon as another one needs its place."""


class ShardServer:
    """Listens on the worker's port from construction until `close`, with one thread per connection.

    A peer must know `token` and be of this server's generation. A peer of an older generation gets a
    `StaleGenerationError`; one of a newer generation gets an `UnavailableError` and tries again, because
    this worker has yet to learn of that generation. Beyond `max_connections`, the oldest connection that
    has shown no token for half a second makes room. If there is none, the new connection is closed, and
    the peer tries again. Without a token only loopback addresses are allowed.
    """

    def __init__(
        self,
        store: ShardStore,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        generation: int = 0,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 10.0,
        max_connections: int = 32,
    ) -> None:
        if token is None and not _is_loopback(host):
            raise ConfigurationError("token", None, f"must be set to serve shards on {host}")
        self._store = store
        self._credentials = Credentials(token)
        self._tls = tls
        self._timeout = timeout
        self._max_connections = max_connections
        self._generation = generation
        self._lock = threading.Lock()
        self._active: dict[threading.Thread, socket.socket] = {}
        # When those arrived who have not shown the token yet, in the order of their arrival.
        self._strangers: dict[threading.Thread, float] = {}
        self._leaving: list[threading.Thread] = []  # told to end, so that others have room
        self._closed = False
        self.bytes_sent = 0
        try:
            self._listener = socket.create_server((host, port), backlog=128)
        except OSError as error:
            raise UnavailableError(f"cannot serve shards on {host}:{port}: {error}") from error
        self._thread = threading.Thread(target=self._accept, name="shard-server", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that peers connect to."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def generation(self) -> int:
        """The generation whose peers are served."""
        return self._generation

    def advance(self, generation: int) -> None:
        """Serve `generation` from now on; transfers of earlier ones stop at their next chunk."""
        with self._lock:
            if generation < self._generation:
                raise StaleGenerationError(
                    f"generation {generation} is older than {self._generation}"
                )
            self._generation = generation

    def close(self) -> None:
        """Stop listening, end every connection, wait for the threads. Closing again changes nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            active = dict(self._active)
            leaving = list(self._leaving)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for connection in active.values():
            shut_down(connection)
        self._thread.join()
        self._listener.close()
        for thread in (*active, *leaving):
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                continue
            thread = threading.Thread(
                target=self._serve,
                args=(connection, f"{peer[0]}:{peer[1]}"),
                name="shard-connection",
                daemon=True,
            )
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                busy = len(self._active) >= self._max_connections and not self._make_room()
                if not busy:
                    self._active[thread] = connection
                    self._strangers[thread] = time.monotonic()
            if busy:
                connection.close()  # the peer sees a closed connection and tries again later
            else:
                thread.start()

    def _make_room(self) -> bool:
        """End the oldest connection that has not shown the token in time; `False`: there is none."""
        thread = next(iter(self._strangers), None)
        if thread is None or time.monotonic() - self._strangers[thread] < _SECONDS_FOR_TOKEN:
            return False
        del self._strangers[thread]
        shut_down(self._active.pop(thread))
        self._leaving.append(thread)
        return True

    def _serve(self, raw: socket.socket, peer: str) -> None:
        try:
            with contextlib.suppress(TensorForgeError, OSError), self._secured(raw) as sock:
                self._answer(Connection(sock, peer))
        finally:
            with self._lock:
                thread = threading.current_thread()
                self._active.pop(thread, None)
                self._strangers.pop(thread, None)
                if thread in self._leaving:
                    self._leaving.remove(thread)

    @contextlib.contextmanager
    def _secured(self, raw: socket.socket) -> Iterator[socket.socket]:
        with raw:
            raw.settimeout(self._timeout)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                yield raw
            else:
                with self._tls.wrap_socket(
                    raw, server_side=True, do_handshake_on_connect=False
                ) as sock:
                    self._register(sock)
                    _shake_hands(sock)
                    yield sock

    def _register(self, sock: socket.socket) -> None:
        """Let `close` end this TLS socket, which has replaced the accepted socket."""
        with self._lock:
            thread = threading.current_thread()
            if self._closed or thread not in self._active:
                raise ClosedError("the shard server was closed, or needs the room for others")
            self._active[thread] = sock

    def _answer(self, connection: Connection) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.send(Greeting(protocol=PROTOCOL, version=VERSION, nonce=nonce))
        client_nonce = b""
        try:
            if self._tls is None and connection.receive_bytes(len(PREAMBLE)) != PREAMBLE:
                return  # a client that speaks TLS learns the reason from the greeting
            request = connection.receive(ShardRequest, self._credentials, nonce)
            client_nonce = request.nonce
            with self._lock:
                self._strangers.pop(threading.current_thread(), None)
            self._check(request)
            stream = self._store.open_range(request.start, request.stop)
            offset = _agreed_offset(stream, request)
        except TensorForgeError as error:
            connection.send(ShardReply.refuse(error), self._credentials, client_nonce)
            return
        reply = ShardReply(body_bytes=stream.body_bytes, offset=offset)
        connection.send(reply, self._credentials, client_nonce)
        self._send_chunks(connection, stream, offset, request.generation)

    def _check(self, request: ShardRequest) -> None:
        if request.generation < self._generation:
            raise StaleGenerationError(
                f"{request.worker} is of generation {request.generation}; "
                f"this server is at {self._generation}"
            )
        if request.generation > self._generation:
            raise UnavailableError(
                f"this server is at generation {self._generation} and does not know "
                f"{request.generation} yet; try again"
            )
        if request.dataset_size != self._store.info.size:
            raise InvalidInputError(
                f"{request.worker} has a data set of {request.dataset_size} samples, "
                f"this server has one of {self._store.info.size}"
            )

    def _send_chunks(
        self, connection: Connection, stream: RangeStream, offset: int, generation: int
    ) -> None:
        for number in range(offset // BLOCK, stream.blocks):
            if self._generation != generation or self._closed:
                return  # the peer learns the reason when it asks again
            block, recorded = stream.chunk(number)
            connection.socket.sendall(CHUNK_HEADER.pack(len(block), recorded))
            connection.socket.sendall(block)
            self.bytes_sent += len(block)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _agreed_offset(stream: RangeStream, request: ShardRequest) -> int:
    """The offset to send from: the requested one if the peer's blocks equal the stream's, otherwise 0."""
    blocks, rest = divmod(request.offset, BLOCK)
    if rest or not 0 < blocks <= stream.blocks:
        has_everything = request.offset == stream.body_bytes and request.offset > 0
        if not has_everything:
            return 0
        blocks = stream.blocks
    checksums = [stream.block_checksum(number) for number in range(blocks)]
    return request.offset if checksum_of_checksums(checksums) == request.prefix else 0


def _shake_hands(sock: ssl.SSLSocket) -> None:
    """Complete the TLS handshake; if it fails, give the peer time to read the alert before closing."""
    try:
        sock.do_handshake()
    except ssl.SSLError as error:
        if error.reason in NOT_TLS:
            socket.socket.sendall(sock, TLS_ALERT)  # OpenSSL sends no alert to a peer without TLS
        sock.shutdown(socket.SHUT_WR)
        for _ in range(_MAX_UNREAD_PIECES):
            # If unread bytes were left, the kernel would reset the connection before the alert is read.
            if not sock.recv(4096):
                break
        raise


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
