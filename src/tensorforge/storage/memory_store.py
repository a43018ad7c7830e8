"""A blob store in memory, for tests; property tests compare other stores with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Self

from tensorforge.errors import AlreadyExistsError, ClosedError, NotFoundError
from tensorforge.storage.blobs import (
    BlobData,
    BlobInfo,
    Buffer,
    buffers_of,
    check_range,
    flat,
    validate_key,
)


class MemoryStore:
    """Blobs in a dictionary. It keeps all promises of a blob store, but ends with the process."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._blobs: dict[str, tuple[bytes, datetime]] = {}

    @property
    def url(self) -> str:
        """`memory://` and the store's name."""
        return f"memory://{self._name}"

    def write(self, key: str, data: BlobData) -> BlobInfo:
        """Store a blob, replacing one of the same key."""
        return self._put(validate_key(key), b"".join(buffers_of(data)))

    def create(self, key: str, data: BlobData) -> BlobInfo:
        """Store a blob under a new key; `AlreadyExistsError` if the key is taken."""
        return self._put(validate_key(key), b"".join(buffers_of(data)), new=True)

    def _put(self, key: str, content: bytes, *, new: bool = False) -> BlobInfo:
        with self._lock:
            if new and key in self._blobs:
                raise AlreadyExistsError(f"{self.url}: {key} exists already")
            self._blobs[key] = (content, datetime.now(UTC))
            return self._info(key)

    def open_writer(self, key: str, size_hint: int | None = None) -> MemoryWriter:  # noqa: ARG002  memory needs no hint
        """Start a blob that is written in pieces."""
        return MemoryWriter(self, validate_key(key))

    def read(self, key: str) -> bytes:
        """The bytes of a blob; `NotFoundError` if there is none."""
        with self._lock:
            return self._content(validate_key(key))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the blob's bytes from `offset`."""
        with self._lock:
            content = self._content(validate_key(key))
        target = flat(buffer)
        check_range(key, offset, len(target), len(content))
        target[:] = content[offset : offset + len(target)]

    def stat(self, key: str) -> BlobInfo:
        """The size and time of a blob; `NotFoundError` if there is none."""
        with self._lock:
            self._content(validate_key(key))
            return self._info(key)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob whose key starts with `prefix`, in order of keys."""
        with self._lock:
            found = [self._info(key) for key in sorted(self._blobs) if key.startswith(prefix)]
        return iter(found)

    def delete(self, key: str) -> None:
        """Remove a blob; a missing blob is not an error."""
        with self._lock:
            self._blobs.pop(validate_key(key), None)

    def sweep(self) -> int:
        """Return 0: the bytes of an unfinished writer are freed with it."""
        return 0

    def close(self) -> None:
        """Do nothing: there are no connections."""

    def _content(self, key: str) -> bytes:
        if key not in self._blobs:
            raise NotFoundError(f"{self.url} has no {key}")
        return self._blobs[key][0]

    def _info(self, key: str) -> BlobInfo:
        content, modified_at = self._blobs[key]
        return BlobInfo(key, len(content), modified_at)


class MemoryWriter:
    """Collects the pieces of a blob until it is committed."""

    def __init__(self, store: MemoryStore, key: str) -> None:
        self._store = store
        self._key = key
        self._pieces: list[bytes] | None = []

    def append(self, data: Buffer) -> None:
        """Add bytes at the end."""
        if self._pieces is None:
            raise ClosedError(f"the writer of {self._key} has ended")
        self._pieces.append(bytes(flat(data)))

    def commit(self) -> BlobInfo:
        """Make the blob visible, replacing one of the same key."""
        if self._pieces is None:
            raise ClosedError(f"the writer of {self._key} has ended")
        pieces, self._pieces = self._pieces, None
        return self._store.write(self._key, pieces)

    def abort(self) -> None:
        """Discard what was written."""
        self._pieces = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()
