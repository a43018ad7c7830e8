"""The client side of a transfer: fetch one range from a peer or the origin into the local store."""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tensorforge.cluster.workers import WorkerId
from tensorforge.data.plan.shards import DataShard
from tensorforge.data.segments.packed_dataset import Origin
from tensorforge.data.segments.part_file import PartFile
from tensorforge.data.segments.segment import BLOCK, checksum, checksum_of_checksums
from tensorforge.data.segments.shard_store import ShardStore
from tensorforge.data.transfer.chunk_buffers import BufferHandle, BufferPool, HostBuffers
from tensorforge.data.transfer.wire_protocol import (
    CHUNK_HEADER,
    NONCE_BYTES,
    PREAMBLE,
    PROTOCOL,
    VERSION,
    Connection,
    Credentials,
    Greeting,
    ShardReply,
    ShardRequest,
    shut_down,
    tls_failure,
)
from tensorforge.errors import (
    CapacityError,
    EncodingError,
    IntegrityError,
    TransferCancelledError,
    UnavailableError,
)

Progress = Callable[[int], None]
"""Called with the number of bytes each time that bytes were verified and written."""


class Cancellation:
    """A stop signal, shared by all transfers of a plan; `cancel` also ends their open connections."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()

    def cancel(self) -> None:
        """Make `check` raise from now on and end every watched connection. Calling again changes nothing."""
        self._event.set()
        with self._lock:
            for sock in self._sockets:
                shut_down(sock)

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._event.is_set()

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`, or until cancelled."""
        self._event.wait(seconds)

    def check(self) -> None:
        """Raise `TransferCancelledError` once cancelled."""
        if self._event.is_set():
            raise TransferCancelledError("the transfer was cancelled")

    @contextlib.contextmanager
    def watching(self, sock: socket.socket) -> Iterator[None]:
        """Let `cancel` end this connection while the block runs."""
        with self._lock:
            self._sockets.add(sock)
        try:
            self.check()
            yield
        finally:
            with self._lock:
                self._sockets.discard(sock)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFetcher:
    """Fetches ranges into `store`. A range becomes part of the store only when all of it is verified."""

    store: ShardStore
    name: str = "worker"
    origin: Origin | None = None
    credentials: Credentials = field(default_factory=Credentials)
    buffers: BufferPool = field(default_factory=lambda: HostBuffers(16 * BLOCK))
    tls: ssl.SSLContext | None = None
    timeout: float = 10.0

    def from_peer(
        self,
        source: WorkerId,
        shard: DataShard,
        generation: int,
        cancellation: Cancellation,
        progress: Progress,
    ) -> None:
        """Fetch a range from a worker that stores it, continuing after the blocks of an earlier attempt.

        A broken or damaged transfer is an `UnavailableError`; verified blocks stay for the next attempt.
        """
        with (
            self._receiving(shard) as part,
            self._lent_buffer() as memory,
            self._connected(source, cancellation) as connection,
        ):
            self._open(connection, part, generation)
            _receive_chunks(connection, part, memory.buffer(), cancellation, progress)
            part.commit()

    def from_origin(self, shard: DataShard, cancellation: Cancellation, progress: Progress) -> None:
        """Fetch a range from the origin, continuing after the blocks of an earlier attempt."""
        if self.origin is None:
            raise UnavailableError("no origin store is configured to fetch from")
        with self._receiving(shard) as part:
            stream = self.origin.open_range(shard.start_index, shard.end_index)
            part.begin(stream.body_bytes)
            done = -(-part.verified_bytes // BLOCK)
            here = checksum_of_checksums([stream.block_checksum(n) for n in range(done)])
            if done and here != part.prefix_checksum:
                part.restart()
                done = 0
            for number in range(done, stream.blocks):
                cancellation.check()
                with self._lent_buffer():
                    block = stream.block(number)
                    part.append(block)
                progress(len(block))
            cancellation.check()
            part.commit()

    @contextlib.contextmanager
    def _receiving(self, shard: DataShard) -> Iterator[PartFile]:
        with self.store.receive(shard.start_index, shard.end_index) as part:
            try:
                yield part
            except CapacityError:
                part.discard()  # a range that cannot be finished must not fill the disk
                raise

    @contextlib.contextmanager
    def _lent_buffer(self) -> Iterator[BufferHandle]:
        handle = self.buffers.acquire(BLOCK, self.timeout)
        try:
            yield handle
        finally:
            handle.free()

    @contextlib.contextmanager
    def _connected(self, source: WorkerId, cancellation: Cancellation) -> Iterator[Connection]:
        try:
            raw = socket.create_connection((source.hostname, source.port), self.timeout)
        except OSError as error:
            raise UnavailableError(f"cannot connect to {source}: {error}") from error
        with raw, self._wrapped(raw, source) as sock, cancellation.watching(sock):
            try:
                if isinstance(sock, ssl.SSLSocket):
                    _shake_hands(sock, source)
                yield Connection(sock, str(source))
            except UnavailableError:
                cancellation.check()  # a connection that `cancel` ended is no failure of the peer
                raise

    def _wrapped(self, raw: socket.socket, source: WorkerId) -> socket.socket:
        if self.tls is None:
            return raw
        return self.tls.wrap_socket(
            raw, server_hostname=source.hostname, do_handshake_on_connect=False
        )

    def _open(self, connection: Connection, part: PartFile, generation: int) -> None:
        """Send the request and prepare `part` for the offset that the server will send from."""
        if self.tls is None:
            connection.send_bytes(PREAMBLE)
        greeting = connection.receive(Greeting)
        if (greeting.protocol, greeting.version) != (PROTOCOL, VERSION):
            raise EncodingError(
                f"{connection.peer} speaks {greeting.protocol} {greeting.version}, not {PROTOCOL} {VERSION}"
            )
        nonce = secrets.token_bytes(NONCE_BYTES)
        request = ShardRequest(
            worker=self.name,
            generation=generation,
            dataset_size=self.store.info.size,
            start=part.start,
            stop=part.stop,
            offset=part.verified_bytes,
            prefix=part.prefix_checksum,
            nonce=nonce,
        )
        connection.send(request, self.credentials, greeting.nonce)
        reply = connection.receive(ShardReply, self.credentials, nonce)
        reply.require()
        part.begin(reply.body_bytes)
        if reply.offset != part.verified_bytes:
            part.restart()
        if reply.offset != part.verified_bytes:
            raise EncodingError(
                f"{connection.peer} sends from {reply.offset}, which was not requested"
            )


def _shake_hands(sock: ssl.SSLSocket, source: WorkerId) -> None:
    try:
        sock.do_handshake()
    except ssl.SSLError as error:
        raise tls_failure(str(source), error) from error
    except OSError as error:
        raise UnavailableError(f"no secure connection to {source}: {error}") from error


def _receive_chunks(
    connection: Connection,
    part: PartFile,
    memory: memoryview,
    cancellation: Cancellation,
    progress: Progress,
) -> None:
    header = memoryview(bytearray(CHUNK_HEADER.size))
    while not part.is_complete:
        cancellation.check()
        connection.receive_into(header)
        length, expected = CHUNK_HEADER.unpack(header)
        if length != min(BLOCK, part.body_bytes - part.verified_bytes):
            raise UnavailableError(f"{connection.peer} sent a chunk of {length} bytes")
        block = memory[:length]
        connection.receive_into(block)
        found = checksum(block)
        if found != expected:
            damage = IntegrityError(
                f"a chunk at {part.verified_bytes} from {connection.peer} arrived damaged: "
                f"CRC-32C {found:08x}, expected {expected:08x}"
            )
            raise UnavailableError(str(damage)) from damage
        part.append(block, found)
        progress(length)
