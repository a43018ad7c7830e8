"""The interface of blob stores, their promises, and the rules for keys.

Checkpoints rely on three promises of every store:

1. A blob appears complete or not at all, and is durable when `write`, `create` or `commit` returns.
2. Of several concurrent `create` calls for one key exactly one succeeds; this is how a checkpoint is committed.
3. A key never leads outside the store.

`LocalStore`, `MemoryStore` and `ObjectStore` are blob stores. A `PositionalBlobStore` also takes the parts of a
blob in any order and from several threads. A `PiecewiseBlobStore` can pass on each piece of a blob as soon as
it is read.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, Self, TypeAlias, runtime_checkable

from tensorforge.errors import EncodingError, InvalidInputError

Buffer: TypeAlias = bytes | bytearray | memoryview
BlobData: TypeAlias = Buffer | Iterable[Buffer]

STAGING = ".staging"
"""The first part of keys that are reserved for the store itself."""

_MAX_KEY_BYTES = 1024
_MAX_PART_BYTES = 255


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A blob's key, its size in bytes and when it was written, in UTC."""

    key: str
    size: int
    modified_at: datetime


class BlobWriter(Protocol):
    """Writes a blob from front to back. The blob is visible only after `commit`.

    As a context manager it aborts if the block raises or ends without a commit.
    """

    def append(self, data: Buffer) -> None:
        """Add bytes at the end; the buffer may be reused as soon as this returns."""

    def commit(self) -> BlobInfo:
        """Make the blob visible and durable, replacing one of the same key."""

    def abort(self) -> None:
        """Discard what was written; after a commit or an abort this does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class BlobStore(Protocol):
    """A flat space of keys, each with one immutable byte string. Safe to share between threads."""

    @property
    def url(self) -> str:
        """The URL by which `open_store` opens this store, without secrets."""

    def write(self, key: str, data: BlobData) -> BlobInfo:
        """Store a blob, replacing one of the same key."""

    def create(self, key: str, data: BlobData) -> BlobInfo:
        """Store a blob under a new key; `AlreadyExistsError` if the key is taken."""

    def open_writer(self, key: str, size_hint: int | None = None) -> BlobWriter:
        """Start a blob that is written in pieces; with `size_hint` a full store is detected early."""

    def read(self, key: str) -> bytes:
        """The bytes of a blob; `NotFoundError` if there is none."""

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the blob's bytes from `offset`.

        `NotFoundError` if there is no blob, `EncodingError` if it ends before the buffer is full.
        """

    def stat(self, key: str) -> BlobInfo:
        """The size and time of a blob; `NotFoundError` if there is none."""

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob whose key starts with `prefix`, in order of keys."""

    def delete(self, key: str) -> None:
        """Remove a blob; a missing blob is not an error."""

    def sweep(self) -> int:
        """Remove the unfinished files of writers that died, and return how many were removed."""

    def close(self) -> None:
        """Close connections; closing again changes nothing."""


class PositionalWriter(Protocol):
    """Writes the parts of a blob in any order, from any number of threads.

    Offsets, lengths and the addresses of buffers must be multiples of `alignment`.
    """

    @property
    def alignment(self) -> int:
        """The number that offsets, lengths and addresses must be multiples of."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write bytes at `offset`."""

    def commit(self, size: int) -> BlobInfo:
        """Truncate the blob to `size` bytes and make it visible and durable; `AlreadyExistsError` if taken."""

    def abort(self) -> None:
        """Discard what was written; after a commit or an abort this does nothing."""


@runtime_checkable
class PositionalBlobStore(Protocol):
    """A store that writes the parts of one blob in parallel."""

    def open_positional(self, key: str, size: int) -> PositionalWriter:
        """Start a blob of `size` bytes under a new key and reserve room for it."""


class PiecewiseReader(Protocol):
    """Reads a range of a blob sequentially, one buffer after the other."""

    def fill(self, target: memoryview, on_piece: Callable[[memoryview], object]) -> None:
        """Fill `target` with the next bytes and call `on_piece` with each piece as soon as it is read."""


@runtime_checkable
class PiecewiseBlobStore(Protocol):
    """A store whose reader passes on each piece while it is still in the processor's cache."""

    def is_cached(self, key: str) -> bool:
        """Whether a blob can be read from memory, without waiting for a disk or a network."""

    def open_range(
        self, key: str, offset: int, length: int
    ) -> AbstractContextManager[PiecewiseReader]:
        """Open a range that one thread reads from its start to its end."""


def validate_key(key: str) -> str:
    """Return `key` if it may name a blob; otherwise raise an `InvalidInputError` with the reason.

    A key is one or more parts joined by `/`. No part is empty, `.` or `..`, and none contains a control
    character, so that no key leads outside the store or garbles a terminal.
    """
    reason = _reason_against(key)
    if reason:
        raise InvalidInputError(f"{key!r} is not a valid key: {reason}")
    return key


@functools.lru_cache(4096)
def _reason_against(key: str) -> str | None:
    if not key:
        return "it is empty"
    try:
        encoded = key.encode()
    except UnicodeEncodeError:
        return "it contains a lone surrogate"
    if len(encoded) > _MAX_KEY_BYTES:
        return f"it is longer than {_MAX_KEY_BYTES} bytes"
    if key.startswith("/"):
        return "it is absolute"
    if any(unicodedata.category(character) == "Cc" for character in key):
        return "it contains a control character"
    parts = key.split("/")
    if not all(parts):
        return "it has an empty part"
    if any(part in (".", "..") for part in parts):
        return "a part of it is '.' or '..'"
    if any(len(part.encode()) > _MAX_PART_BYTES for part in parts):
        return f"a part of it is longer than {_MAX_PART_BYTES} bytes"
    if parts[0] == STAGING:
        return f"{STAGING} is reserved for the store"
    return None


def buffers_of(data: BlobData) -> Iterator[memoryview]:
    """The buffers of `data`, one or many, as one-dimensional views of bytes."""
    if isinstance(data, bytes | bytearray | memoryview):
        yield flat(data)
    else:
        for piece in data:
            yield flat(piece)


def flat(data: Buffer) -> memoryview:
    """A one-dimensional view of bytes."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def check_range(key: str, offset: int, length: int, size: int) -> None:
    """Raise unless a blob of `size` bytes has `length` bytes from `offset` on."""
    if offset < 0:
        raise InvalidInputError(f"{key}: offset {offset} is negative")
    if offset + length > size:
        raise EncodingError(
            f"{key} has {size} bytes, but {offset + length} are needed: it is truncated"
        )
