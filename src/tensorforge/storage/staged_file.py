"""A file that is invisible to readers until it is complete.

It is written in the store's staging folder under a random name. Its writer holds a file lock, which the system
releases when the process dies. So a staged file without a lock belongs to a dead writer, and any process may
delete it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Self

from tensorforge.errors import AlreadyExistsError, ClosedError, InvalidInputError
from tensorforge.storage.blobs import BlobInfo, Buffer, flat
from tensorforge.storage.system_calls import SystemCalls, translate

DIRECT_ALIGNMENT = 4096
"""Direct writes use multiples of this as offset, length and address; disks require 512 or 4096."""

_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP}
_NO_RESERVE = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}

Destination = Callable[[], contextlib.AbstractContextManager[tuple[int, str]]]
"""Opens the folder of a blob, created if missing, and yields it with the file's name."""


class StagedFile:
    """A file in the staging folder, until it is published under its final name or discarded."""

    def __init__(self, system: SystemCalls, staging: int, what: str, *, direct: bool) -> None:
        self._system = system
        self._staging = staging
        self._what = what
        self.direct = direct
        self._lock = threading.Lock()
        self._writes = 0
        self._ended = False
        self._name, self._file = self._create()

    def _create(self) -> tuple[str, int]:
        while True:
            name = uuid.uuid4().hex
            file = self._open(name)
            fcntl.flock(file, fcntl.LOCK_EX)
            # A sweep may delete the file between creation and lock; then start again with a new name.
            if os.fstat(file).st_nlink:
                return name, file
            os.close(file)

    def _open(self, name: str) -> int:
        if self.direct:
            try:
                return self._system.create(name, os.O_WRONLY | os.O_DIRECT, self._staging)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
                # Some file systems report this only after they have created the file.
                with contextlib.suppress(FileNotFoundError):
                    self._system.unlink(name, self._staging)
                self.direct = False
        return self._system.create(name, os.O_WRONLY, self._staging)

    def reserve(self, size: int) -> None:
        """Reserve room for `size` bytes, so that a full disk is detected before writing."""
        if size:
            try:
                self._system.reserve(self._file, size)
            except OSError as error:
                if error.errno not in _NO_RESERVE:
                    raise

    def write(self, data: memoryview) -> None:
        """Write all of `data` at the end."""
        while data:
            data = data[self._system.write(self._descriptor(), data) :]

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`."""
        with self._writing() as file:
            while data and not self._ended:
                done = self._system.write_at(file, data, offset)
                data, offset = data[done:], offset + done

    def truncate(self, size: int) -> None:
        """Truncate the file to `size` bytes."""
        self._system.truncate(self._descriptor(), size)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[int]:
        """Keep the descriptor open in the block, even if another thread ends the file meanwhile."""
        with self._lock:
            file = self._descriptor()
            self._writes += 1
        try:
            yield file
        finally:
            with self._lock:
                self._writes -= 1
                if self._ended and not self._writes:
                    os.close(file)

    def _descriptor(self) -> int:
        if self._ended:
            raise ClosedError(f"{self._what}: the writer has ended")
        return self._file

    def publish(self, destination: Destination, *, replace: bool) -> os.stat_result:
        """Sync the file, give it its final name, and sync the folder."""
        self._system.sync(self._descriptor())
        with destination() as (folder, name):
            if replace:
                self._system.replace(self._name, self._staging, name, folder)
            else:
                self._link(folder, name)
            self._system.sync(folder)
        facts = os.fstat(self._file)
        self._close()
        return facts

    def _link(self, folder: int, name: str) -> None:
        try:
            self._system.link(self._name, self._staging, name, folder)
        except FileExistsError as error:
            raise AlreadyExistsError(f"{self._what} exists already") from error
        self._system.unlink(self._name, self._staging)

    def discard(self) -> None:
        """Delete the file unless it was published."""
        if not self._ended:
            try:
                with contextlib.suppress(FileNotFoundError):
                    self._system.unlink(self._name, self._staging)
            finally:
                self._close()

    def _close(self) -> None:
        with self._lock:
            if not self._ended:
                self._ended = True
                if not self._writes:
                    os.close(self._file)


class LocalWriter:
    """Writes a blob from front to back with `append`, or in any order from many threads with `write_at`."""

    def __init__(self, key: str, staged: StagedFile, destination: Destination, *, replace: bool):
        self._key = key
        self._staged = staged
        self._destination = destination
        self._replace = replace

    @property
    def alignment(self) -> int:
        """The number that offsets, lengths and addresses of `write_at` must be multiples of."""
        return DIRECT_ALIGNMENT if self._staged.direct else 1

    def append(self, data: Buffer) -> None:
        """Add bytes at the end."""
        view = flat(data)
        with translated(self._key, len(view)):
            self._staged.write(view)

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write bytes at `offset`."""
        if offset % self.alignment or len(data) % self.alignment:
            raise InvalidInputError(
                f"{self._key}: {len(data)} bytes at {offset} are not aligned to {self.alignment}"
            )
        with translated(self._key, len(data)):
            self._staged.write_at(offset, data)

    def commit(self, size: int | None = None) -> BlobInfo:
        """Make the blob visible and durable, truncated to `size` bytes if given."""
        with translated(self._key):
            if size is not None:
                self._staged.truncate(size)
            facts = self._staged.publish(self._destination, replace=self._replace)
        return info_of(self._key, facts)

    def abort(self) -> None:
        """Discard what was written; after a commit or an abort this does nothing."""
        with translated(self._key):
            self._staged.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


@contextlib.contextmanager
def translated(what: str, requested: int = 0) -> Iterator[None]:
    """Translate errors of the operating system in the block into `TensorForgeError`s."""
    try:
        yield
    except OSError as error:
        raise translate(error, what, requested) from error


def info_of(key: str, facts: os.stat_result) -> BlobInfo:
    """The description of a blob from the status of its file."""
    return BlobInfo(key, facts.st_size, datetime.fromtimestamp(facts.st_mtime, UTC))
