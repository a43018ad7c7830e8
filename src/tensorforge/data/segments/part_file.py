"""The file of a range of samples that a worker is receiving."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tensorforge.data.segments.segment import (
    BLOCK,
    HEADER,
    checksum,
    checksum_of_checksums,
    encode_header,
    encode_table,
    file_bytes,
    segment_name,
)
from tensorforge.errors import (
    CapacityError,
    ConflictError,
    InvalidInputError,
    TransferCancelledError,
    UnavailableError,
)

if TYPE_CHECKING:
    from tensorforge.data.segments.shard_store import ShardStore


class PartFile:
    """A range being received block by block. `commit` turns the complete file into a segment.

    Appended blocks survive this process: the next attempt continues at `verified_bytes`, a multiple of the
    block size or the end. The two sides of a transfer compare `prefix_checksum` to find out whether these
    blocks are the beginning of what the source has.
    """

    def __init__(self, store: ShardStore, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.body_bytes = 0
        self.verified_bytes = 0
        self._store = store
        self._name = segment_name(start, stop)
        self._path = store.folder / "incoming" / part_name(start, stop)
        self._checksums: list[int] = []
        self._lock = threading.Lock()
        self._is_superseded = False
        with translated(str(self._path)):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o644)

    def supersede(self) -> None:
        """Refuse every later write by this object: another attempt now owns the file."""
        with self._lock:
            self._is_superseded = True

    def take_over(self) -> None:
        """Read back the complete blocks that an earlier attempt wrote, to continue after them."""
        header = os.pread(self._descriptor, HEADER.size, 0)
        if len(header) < HEADER.size:
            return
        size = HEADER.unpack(header)[3]
        if header != encode_header(self.start, self.stop, size):
            return
        present = min(os.fstat(self._descriptor).st_size - HEADER.size, size)
        end = present if present == size else present - present % BLOCK
        for offset in range(0, end, BLOCK):
            block = os.pread(self._descriptor, min(BLOCK, end - offset), HEADER.size + offset)
            self._checksums.append(checksum(block))
        self.body_bytes, self.verified_bytes = size, end

    def begin(self, body_bytes: int) -> None:
        """Set the size of the body; blocks of an earlier attempt with another size are discarded."""
        if self._checksums and self.body_bytes == body_bytes:
            return
        self.body_bytes = body_bytes
        self.restart()

    def restart(self) -> None:
        """Discard every received block and start the file anew."""
        self._checksums, self.verified_bytes = [], 0
        with self._writing():
            # ext4 flushes a truncated file when it is closed, so an empty file is not truncated.
            if os.fstat(self._descriptor).st_size:
                os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, encode_header(self.start, self.stop, self.body_bytes), 0)

    @property
    def prefix_checksum(self) -> int:
        """One checksum for all verified blocks; both sides of a resumed transfer compare it."""
        return checksum_of_checksums(self._checksums)

    @property
    def is_complete(self) -> bool:
        """Whether every byte of the body was received."""
        return self.verified_bytes == self.body_bytes

    def append(self, block: bytes | bytearray | memoryview, found: int | None = None) -> None:
        """Append the next block; `found` is its checksum if the caller has already computed it."""
        expected = min(BLOCK, self.body_bytes - self.verified_bytes)
        if len(block) != expected:
            raise InvalidInputError(f"a block has {len(block)} bytes, expected {expected}")
        view, offset = memoryview(block), HEADER.size + self.verified_bytes
        with self._writing():
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written
        self._checksums.append(checksum(block) if found is None else found)
        self.verified_bytes += len(block)

    def commit(self) -> None:
        """Write the table of checksums and rename the complete file to a segment of the store."""
        if not self.is_complete:
            raise ConflictError(
                f"{self._name}: only {self.verified_bytes} of {self.body_bytes} bytes were received"
            )
        with self._writing():
            end = HEADER.size + self.body_bytes
            table = encode_table(self._checksums)
            os.pwrite(self._descriptor, table, end)
            os.ftruncate(self._descriptor, end + len(table))
            self._path.replace(self._store.folder / "segments" / self._name)
        self._store.refresh()

    def discard(self) -> None:
        """Delete the file, so that it takes no room on the disk."""
        with self._writing():
            self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock, translated(str(self._path), file_bytes(self.body_bytes)):
            if self._is_superseded:
                raise TransferCancelledError(f"a newer transfer of {self._name} replaced this one")
            yield

    def close(self) -> None:
        """Close the file but keep it, so that another attempt can continue."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._store.forget_part(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def part_name(start: int, stop: int) -> str:
    """The file name of the part file for `[start, stop)`."""
    return segment_name(start, stop).replace(".tfs", ".part")


@contextlib.contextmanager
def translated(where: str, requested: int = 0) -> Iterator[None]:
    """Turn an `OSError` in the block into a `CapacityError` (disk full) or an `UnavailableError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CapacityError(
                f"{where}: no room for {requested} bytes ({error.strerror})",
                requested=requested,
                available=_free_bytes(where),
            ) from error
        raise UnavailableError(f"{where}: {error.strerror}") from error


def _free_bytes(where: str) -> int:
    with contextlib.suppress(OSError):
        found = os.statvfs(Path(where).parent)
        return found.f_bavail * found.f_frsize
    return 0
