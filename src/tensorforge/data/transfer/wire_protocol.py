"""What two workers say to each other when one fetches a shard. No pickle, every size bounded.

    client → server   preamble   8 bytes, so that a server that expects TLS notices; not sent over TLS
    server → client   greeting   {"protocol", "version", "nonce"}
    client → server   request    a `ShardRequest`, and its proof
    server → client   reply      a `ShardReply`, and its proof
    server → client   chunks     length, CRC-32C, bytes; from the agreed offset to the end

A message is its length in 4 bytes and JSON. A proof is an HMAC-SHA-256 of the message and the other
side's nonce under the job's token: each side shows that it knows the token, the token itself never travels,
and an overheard message is of no use later. Without a token proofs are made with an empty key and prove
nothing; servers allow that on loopback alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import ssl
import struct
from dataclasses import dataclass
from typing import Final, TypeVar

from tensorforge.encoding import decode, encode
from tensorforge.errors import (
    AuthenticationError,
    ConflictError,
    DeadlineExceededError,
    EncodingError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    StaleGenerationError,
    TensorForgeError,
    UnavailableError,
)

PROTOCOL: Final = "tensorforge-shards"
VERSION: Final = 2
PREAMBLE: Final = b"TFSHARDS"
TLS_ALERT: Final = bytes.fromhex("15 0301 0002 02 46")
"""A fatal alert of TLS: the other side's version of the protocol is none."""
NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
"""OpenSSL's reasons when the other side does not speak TLS."""
NONCE_BYTES: Final = 16
CHUNK_HEADER: Final = struct.Struct("<II")
_LENGTH: Final = struct.Struct("<I")
_MAX_MESSAGE: Final = 16 << 10

Message = TypeVar("Message")

_REFUSALS: Final[dict[str, type[TensorForgeError]]] = {
    error.__name__: error
    for error in (
        AuthenticationError,
        ConflictError,
        EncodingError,
        IntegrityError,
        InvalidInputError,
        NotFoundError,
        StaleGenerationError,
        UnavailableError,
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """The server's first words."""

    protocol: str
    version: int
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRequest:
    """Samples `[start, stop)`, from `offset` bytes on; `prefix` is the checksum of what is here already."""

    worker: str
    generation: int
    dataset_size: int
    start: int
    stop: int
    offset: int
    prefix: int
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReply:
    """How many bytes there are and where the chunks begin, or why there are none.

    `offset` is 0 when what the client has is not the beginning of what the server has.
    """

    body_bytes: int = 0
    offset: int = 0
    refusal: str = ""
    message: str = ""

    @classmethod
    def refuse(cls, error: TensorForgeError) -> ShardReply:
        """The reply for an error: its nearest kind that may travel, and its words."""
        kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _REFUSALS)
        return cls(refusal=next(kinds, "UnavailableError"), message=str(error))

    def require(self) -> None:
        """Raise the error that the server met."""
        if self.refusal:
            raise _REFUSALS.get(self.refusal, UnavailableError)(self.message)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The job's token, or `None` where loopback is protection enough."""

    token: str | None = None

    def prove(self, message: bytes, nonce: bytes) -> bytes:
        """What shows that the sender of `message` knows the token."""
        key = (self.token or "").encode()
        return hmac.new(key, nonce + message, hashlib.sha256).digest()

    def check(self, message: bytes, nonce: bytes, proof: bytes) -> None:
        """Raise `AuthenticationError` unless the sender knew the token."""
        if not hmac.compare_digest(self.prove(message, nonce), proof):
            raise AuthenticationError("the other side does not know this job's token")

    def __repr__(self) -> str:
        return f"Credentials({'a token' if self.token else 'none'})"


class Connection:
    """A socket that speaks in messages. A failure of the network is an `UnavailableError`, one of trust an
    `AuthenticationError`.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.socket, self.peer = sock, peer

    def send(
        self, message: object, credentials: Credentials | None = None, nonce: bytes = b""
    ) -> None:
        """Send a dataclass and, with credentials, its proof for the receiver's `nonce`."""
        body = json.dumps(encode(message), separators=(",", ":")).encode()
        proof = b"" if credentials is None else credentials.prove(body, nonce)
        self.send_bytes(_LENGTH.pack(len(body)) + body + proof)

    def send_bytes(self, data: bytes) -> None:
        """Send all of `data`."""
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise self.lost(error) from error

    def receive(
        self, expected: type[Message], credentials: Credentials | None = None, nonce: bytes = b""
    ) -> Message:
        """Receive a dataclass and, with credentials, check its proof for our `nonce`."""
        head = self.receive_bytes(_LENGTH.size)
        if head[:2] == TLS_ALERT[:2]:
            raise EncodingError(f"{self.peer} speaks TLS and this side does not: give it `tls`")
        (length,) = _LENGTH.unpack(head)
        if length > _MAX_MESSAGE:
            raise EncodingError(f"{self.peer} announces a message of {length} bytes")
        body = self.receive_bytes(length)
        if credentials is not None:
            credentials.check(body, nonce, self.receive_bytes(hashlib.sha256().digest_size))
        try:
            return decode(json.loads(body), expected)
        except (ValueError, RecursionError) as error:
            raise EncodingError(f"{self.peer} sent no {expected.__name__}: {error}") from error

    def receive_bytes(self, count: int) -> bytes:
        """Exactly `count` bytes."""
        buffer = bytearray(count)
        self.receive_into(memoryview(buffer))
        return bytes(buffer)

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`."""
        try:
            while view:
                count = self.socket.recv_into(view)
                if not count:
                    raise UnavailableError(f"{self.peer} closed the connection")
                view = view[count:]
        except OSError as error:
            raise self.lost(error) from error

    def lost(self, error: OSError) -> TensorForgeError:
        """A failure of the network in our words."""
        if isinstance(error, TimeoutError):
            return DeadlineExceededError(f"{self.peer} did not answer in time")
        if isinstance(error, ssl.SSLError):
            return tls_failure(self.peer, error)
        return UnavailableError(f"the connection to {self.peer} broke: {error}")


def cut(sock: socket.socket) -> None:
    """End a connection that another thread is waiting for; with TLS too, whose own farewell would wait."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def tls_failure(peer: str, error: ssl.SSLError) -> TensorForgeError:
    """Why there is no secure connection: a question of trust, of protocol, or of the network."""
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationError(
            f"the certificate of {peer} is not trusted: {error.verify_message}"
        )
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return AuthenticationError(f"{peer} does not accept this side's certificate: {reason}")
    if reason in NOT_TLS:
        return EncodingError(f"this side speaks TLS and {peer} does not: {reason}")
    return UnavailableError(f"no secure connection to {peer}: {reason}")
