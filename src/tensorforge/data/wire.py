"""What two workers say to each other when one fetches a shard. No pickle, every size bounded.

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

import hashlib
import hmac
import json
import socket
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
VERSION: Final = 1
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
    """A socket that speaks in messages. Every failure of the network is an `UnavailableError`."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.socket, self.peer = sock, peer

    def send(
        self, message: object, credentials: Credentials | None = None, nonce: bytes = b""
    ) -> None:
        """Send a dataclass and, with credentials, its proof for the receiver's `nonce`."""
        body = json.dumps(encode(message), separators=(",", ":")).encode()
        proof = b"" if credentials is None else credentials.prove(body, nonce)
        try:
            self.socket.sendall(_LENGTH.pack(len(body)) + body + proof)
        except OSError as error:
            raise self.lost(error) from error

    def receive(
        self, expected: type[Message], credentials: Credentials | None = None, nonce: bytes = b""
    ) -> Message:
        """Receive a dataclass and, with credentials, check its proof for our `nonce`."""
        (length,) = _LENGTH.unpack(self.receive_bytes(_LENGTH.size))
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

    def lost(self, error: OSError) -> UnavailableError:
        """A failure of the network in our words."""
        if isinstance(error, TimeoutError):
            return DeadlineExceededError(f"{self.peer} did not answer in time")
        return UnavailableError(f"the connection to {self.peer} broke: {error}")
