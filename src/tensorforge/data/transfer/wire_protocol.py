"""The messages between two workers when one fetches a shard from the other. No pickle, every size bounded.

    client → server   preamble   8 bytes that show a TLS server a client without TLS; not sent over TLS
    server → client   greeting   {"protocol", "version", "nonce"}
    client → server   request    a `ShardRequest` and its proof
    server → client   reply      a `ShardReply` and its proof
    server → client   chunks     length, CRC-32C, bytes; from the agreed offset to the end

A message is a length in 4 bytes and JSON of that length. A proof is an HMAC-SHA-256 of the message and the
other side's nonce under the job's token: each side shows that it knows the token, the token is never sent,
and a recorded message cannot be replayed. Without a token the key is empty and a proof proves nothing;
servers allow that only on loopback addresses.
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
"""A fatal TLS alert of the kind `protocol_version`."""
NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
"""The reasons that OpenSSL gives when the other side does not speak TLS."""
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
    """The server's first message."""

    protocol: str
    version: int
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRequest:
    """Asks for the samples `[start, stop)` from byte `offset` on.

    `prefix` is the `checksum_of_checksums` of the blocks before `offset`, which the client already has.
    """

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
    """The size of the range's body and the offset of the first chunk, or the reason for a refusal.

    `offset` is 0 if the client's blocks differ from the server's.
    """

    body_bytes: int = 0
    offset: int = 0
    refusal: str = ""
    message: str = ""

    @classmethod
    def refuse(cls, error: TensorForgeError) -> ShardReply:
        """The reply for an error: the nearest of its classes that the protocol knows, and its text."""
        kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _REFUSALS)
        return cls(refusal=next(kinds, "UnavailableError"), message=str(error))

    def require(self) -> None:
        """Raise the server's error if this is a refusal."""
        if self.refusal:
            raise _REFUSALS.get(self.refusal, UnavailableError)(self.message)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The job's token; `None` only where both sides use loopback addresses."""

    token: str | None = None

    def prove(self, message: bytes, nonce: bytes) -> bytes:
        """The proof that the sender of `message` knows the token."""
        key = (self.token or "").encode()
        return hmac.new(key, nonce + message, hashlib.sha256).digest()

    def check(self, message: bytes, nonce: bytes, proof: bytes) -> None:
        """Raise `AuthenticationError` unless `proof` was made with the same token."""
        if not hmac.compare_digest(self.prove(message, nonce), proof):
            raise AuthenticationError("the other side does not know this job's token")

    def __repr__(self) -> str:
        return f"Credentials({'a token' if self.token else 'none'})"


class Connection:
    """Sends and receives messages over a socket.

    A failure of the network is an `UnavailableError`, a wrong proof an `AuthenticationError`.
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
        """Receive a dataclass and, with credentials, check its proof for this side's `nonce`."""
        head = self.receive_bytes(_LENGTH.size)
        if head[:2] == TLS_ALERT[:2]:
            raise EncodingError(f"{self.peer} speaks TLS and this side does not: set `tls` here")
        (length,) = _LENGTH.unpack(head)
        if length > _MAX_MESSAGE:
            raise EncodingError(
                f"{self.peer} announced a message of {length} bytes, at most {_MAX_MESSAGE}"
            )
        body = self.receive_bytes(length)
        if credentials is not None:
            credentials.check(body, nonce, self.receive_bytes(hashlib.sha256().digest_size))
        try:
            return decode(json.loads(body), expected)
        except (ValueError, RecursionError) as error:
            raise EncodingError(
                f"{self.peer} sent an invalid {expected.__name__}: {error}"
            ) from error

    def receive_bytes(self, count: int) -> bytes:
        """Receive exactly `count` bytes."""
        buffer = bytearray(count)
        self.receive_into(memoryview(buffer))
        return bytes(buffer)

    def receive_into(self, view: memoryview) -> None:
        """Receive exactly as many bytes as `view` has."""
        try:
            while view:
                count = self.socket.recv_into(view)
                if not count:
                    raise UnavailableError(f"{self.peer} closed the connection")
                view = view[count:]
        except OSError as error:
            raise self.lost(error) from error

    def lost(self, error: OSError) -> TensorForgeError:
        """The `TensorForgeError` for a failure of the socket."""
        if isinstance(error, TimeoutError):
            return DeadlineExceededError(f"{self.peer} did not answer in time")
        if isinstance(error, ssl.SSLError):
            return tls_failure(self.peer, error)
        return UnavailableError(f"the connection to {self.peer} failed: {error}")


def shut_down(sock: socket.socket) -> None:
    """End a connection at once, even if another thread waits on it; TLS's own shutdown would wait."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def tls_failure(peer: str, error: ssl.SSLError) -> TensorForgeError:
    """The error for a failed TLS connection: not trusted, not TLS, or a failure of the network."""
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
