"""What a place for named byte strings must offer, and which names are allowed.

A store makes three promises that checkpoints are built on:

1. A blob appears whole or not at all, and what `write`, `create` or `commit` returned from is durable.
2. `create` has one winner: it is how a checkpoint is committed.
3. A key never leads outside the store.

Alternatives are types: `LocalStore`, `MemoryStore`, `ObjectStore`; a store that can also take the parts of
a blob in any order and from several threads is a `PositionalBlobStore`, one that hands bytes over while it
reads on is a `PiecewiseBlobStore`.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Protocol, Self, TypeAlias, runtime_checkable

from tensorforge.errors import EncodingError, InvalidInputError

Buffer: TypeAlias = bytes | bytearray | memoryview
BlobData: TypeAlias = Buffer | Iterable[Buffer]

STAGING = ".staging"
"""The first part of a key that stores keep for themselves."""

_MAX_KEY_BYTES = 1024
_MAX_PART_BYTES = 255


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A blob's key, its size in bytes and when it was written, in UTC."""

    key: str
    size: int
    modified_at: datetime


class BlobWriter(Protocol):
    """A blob being written from front to back. Nobody sees it before `commit`.

    As a context manager it aborts when the block raises, or ends without a commit.
    """

    def append(self, data: Buffer) -> None:
        """Add bytes at the end; the buffer may be reused as soon as this returns."""

    def commit(self) -> BlobInfo:
        """Make the blob visible and durable, replacing one of the same key."""

    def abort(self) -> None:
        """Throw away what was written; after a commit or an abort this does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class BlobStore(Protocol):
    """A flat space of keys, each with one immutable byte string. Safe to share between threads."""

    @property
    def url(self) -> str:
        """What `open_store` opens this store by, without secrets."""

    def write(self, key: str, data: BlobData) -> BlobInfo:
        """Store a blob, replacing one of the same key."""

    def create(self, key: str, data: BlobData) -> BlobInfo:
        """Store a blob under a new key; `AlreadyExistsError` if the key is taken."""

    def open_writer(self, key: str, size_hint: int | None = None) -> BlobWriter:
        """Start a blob that comes in pieces; `size_hint` lets the store find out early that it is full."""

    def read(self, key: str) -> bytes:
        """The whole blob; `NotFoundError` if there is none."""

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the blob's bytes from `offset`.

        `NotFoundError` if there is no blob, `EncodingError` if it ends before the buffer is full.
        """

    def stat(self, key: str) -> BlobInfo:
        """What is known about a blob; `NotFoundError` if there is none."""

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob whose key starts with `prefix`, in order of keys."""

    def delete(self, key: str) -> None:
        """Remove a blob for good; one that does not exist is removed already."""

    def sweep(self) -> int:
        """Remove what crashed writers left behind and return how many pieces that were."""

    def close(self) -> None:
        """Let go of connections; closing twice is fine."""


class PositionalWriter(Protocol):
    """A blob whose parts come in any order, from any number of threads.

    Offsets, lengths and the buffers' addresses are multiples of `alignment`.
    """

    @property
    def alignment(self) -> int:
        """What offsets, lengths and addresses must be multiples of."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Put bytes at `offset`."""

    def commit(self, size: int) -> BlobInfo:
        """Cut the blob to `size` bytes, make it visible and durable; `AlreadyExistsError` if taken."""

    def abort(self) -> None:
        """Throw away what was written; after a commit or an abort this does nothing."""


@runtime_checkable
class PositionalBlobStore(Protocol):
    """A store that writes the parts of one blob in parallel."""

    def open_positional(self, key: str, size: int) -> PositionalWriter:
        """Start a blob of `size` bytes under a new key, its room reserved."""


class PiecewiseReader(Protocol):
    """Reads on through a range, one buffer after the other."""

    def fill(self, target: memoryview, witness: Callable[[memoryview], object]) -> None:
        """Fill `target` with the next bytes, and show the witness each piece as soon as it is there."""


@runtime_checkable
class PiecewiseBlobStore(Protocol):
    """A store whose reader can look at each piece while it is still in the processor's cache."""

    def is_at_hand(self, key: str) -> bool:
        """Whether reading a blob is mere copying, without waiting for a disk or a network."""

    def open_range(
        self, key: str, offset: int, length: int
    ) -> AbstractContextManager[PiecewiseReader]:
        """A range to be read from the front to the end, by one thread."""


def validate_key(key: str) -> str:
    """Return `key` if it may name a blob, otherwise raise `InvalidInputError` that says why not.

    A key is one or more parts joined by `/`. No part is empty, `.` or `..`, and none holds a control
    character, so that no store can be led outside its root or be made to print nonsense.
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
        return "it holds a lone surrogate"
    if len(encoded) > _MAX_KEY_BYTES:
        return f"it is longer than {_MAX_KEY_BYTES} bytes"
    if key.startswith("/"):
        return "it is absolute"
    if any(unicodedata.category(character) == "Cc" for character in key):
        return "it holds a control character"
    parts = key.split("/")
    if not all(parts):
        return "it has an empty part"
    if any(part in (".", "..") for part in parts):
        return "a part of it is '.' or '..'"
    if any(len(part.encode()) > _MAX_PART_BYTES for part in parts):
        return f"a part of it is longer than {_MAX_PART_BYTES} bytes"
    if parts[0] == STAGING:
        return f"{STAGING} is the store's own"
    return None


def buffers_of(data: BlobData) -> Iterator[memoryview]:
    """The buffers of `data`, one or many, as flat views of bytes."""
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
    """Raise unless a blob of `size` bytes holds `length` bytes from `offset`."""
    if offset < 0:
        raise InvalidInputError(f"{key}: offset {offset} is negative")
    if offset + length > size:
        raise EncodingError(
            f"{key} has {size} bytes, but {offset + length} are needed: it was cut short"
        )
