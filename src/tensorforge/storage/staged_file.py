"""A file that nobody sees before it is finished.

It is written in the store's staging folder under a name of its own and held by a lock that the system
lets go when the process dies. So a staged file without a lock is litter, and anybody may sweep it.
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
from types import TracebackType
from typing import Self

from tensorforge.errors import AlreadyExistsError, ClosedError, InvalidInputError
from tensorforge.storage.blobs import BlobInfo, Buffer, flat
from tensorforge.storage.system_calls import SystemCalls, translate

DIRECT_ALIGNMENT = 4096
"""Offsets, lengths and addresses of direct writes; disks ask for 512 or 4096."""

_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP}
_NO_RESERVE = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}

Destination = Callable[[], contextlib.AbstractContextManager[tuple[int, str]]]
"""Opens the folder that a blob goes to (made if missing) and gives it with the file's name."""


class StagedFile:
    """One file from its creation in the staging folder to its publication or its end."""

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
            # A sweeper may have come between creation and lock; then start over under a new name.
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
                # Some file systems notice only after they have made the file.
                with contextlib.suppress(FileNotFoundError):
                    self._system.unlink(name, self._staging)
                self.direct = False
        return self._system.create(name, os.O_WRONLY, self._staging)

    def reserve(self, size: int) -> None:
        """Take the room for `size` bytes, so that a full disk is found out before the work."""
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
        """Cut the file to `size` bytes."""
        self._system.truncate(self._descriptor(), size)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[int]:
        """The descriptor stays open inside the block, even if another thread ends the file meanwhile."""
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
        """Make the bytes durable, give the file its name, make the name durable."""
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
        """Remove the file, if it was not published."""
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
    """A blob written from front to back, or, positionally, in any order from many threads."""

    def __init__(self, key: str, staged: StagedFile, destination: Destination, *, replace: bool):
        self._key = key
        self._staged = staged
        self._destination = destination
        self._replace = replace

    @property
    def alignment(self) -> int:
        """What offsets, lengths and addresses must be multiples of in `write_at`."""
        return DIRECT_ALIGNMENT if self._staged.direct else 1

    def append(self, data: Buffer) -> None:
        """Add bytes at the end."""
        view = flat(data)
        with translated(self._key, len(view)):
            self._staged.write(view)

    def write_at(self, offset: int, data: memoryview) -> None:
        """Put bytes at `offset`."""
        if offset % self.alignment or len(data) % self.alignment:
            raise InvalidInputError(
                f"{self._key}: {len(data)} bytes at {offset} are not aligned to {self.alignment}"
            )
        with translated(self._key, len(data)):
            self._staged.write_at(offset, data)

    def commit(self, size: int | None = None) -> BlobInfo:
        """Make the blob visible and durable, cut to `size` bytes if that is given."""
        with translated(self._key):
            if size is not None:
                self._staged.truncate(size)
            facts = self._staged.publish(self._destination, replace=self._replace)
        return info_of(self._key, facts)

    def abort(self) -> None:
        """Throw away what was written; after a commit or an abort this does nothing."""
        with translated(self._key):
            self._staged.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()


@contextlib.contextmanager
def translated(what: str, requested: int = 0) -> Iterator[None]:
    """Turn the operating system's errors inside the block into ours."""
    try:
        yield
    except OSError as error:
        raise translate(error, what, requested) from error


def info_of(key: str, facts: os.stat_result) -> BlobInfo:
    """A blob's description from its file's."""
    return BlobInfo(key, facts.st_size, datetime.fromtimestamp(facts.st_mtime, UTC))
