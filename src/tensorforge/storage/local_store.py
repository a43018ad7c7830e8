"""Blobs as files below a folder.

    root/.staging/<random>   files being written, each locked by its writer
    root/<key>               complete blobs

Folders are opened one part at a time and symbolic links are not followed, so that neither a hostile key nor
a link in the folder leads outside.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorforge.errors import (
    ClosedError,
    ConflictError,
    NotFoundError,
    TensorForgeError,
    UnavailableError,
)
from tensorforge.storage.blobs import (
    STAGING,
    BlobData,
    BlobInfo,
    buffers_of,
    check_range,
    flat,
    validate_key,
)
from tensorforge.storage.range_reader import RangeReader, is_cached
from tensorforge.storage.staged_file import (
    Destination,
    LocalWriter,
    StagedFile,
    info_of,
    translated,
)
from tensorforge.storage.system_calls import SystemCalls

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO would wait for its writer. It changes nothing for regular files.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_ATTEMPTS = 100
_SMALL_READ = 64 << 10


class LocalStore:
    """A folder of blobs. Safe to share between threads, and between processes on one file system.

    The folder is created when the first blob is written. Tests pass their own `system` calls; `direct=False`
    turns off direct reads and writes, which bypass the page cache.
    """

    def __init__(
        self, root: str | Path, *, system: SystemCalls | None = None, direct: bool = True
    ) -> None:
        self.root = Path(root).expanduser().absolute()
        self._system = system or SystemCalls()
        self._direct = direct
        self._lock = threading.Lock()
        self._staging = -1
        self._closed = False

    @property
    def url(self) -> str:
        """The folder as a `file://` URL."""
        return self.root.as_uri()

    def write(self, key: str, data: BlobData) -> BlobInfo:
        """Store a blob, replacing one of the same key."""
        return self._store(key, data, replace=True)

    def create(self, key: str, data: BlobData) -> BlobInfo:
        """Store a blob under a new key; `AlreadyExistsError` if the key is taken."""
        return self._store(key, data, replace=False)

    def _store(self, key: str, data: BlobData, *, replace: bool) -> BlobInfo:
        with self._writer(key, None, direct=False, replace=replace) as writer:
            for buffer in buffers_of(data):
                writer.append(buffer)
            return writer.commit()

    def open_writer(self, key: str, size_hint: int | None = None) -> LocalWriter:
        """Start a blob that is written in pieces."""
        return self._writer(key, size_hint, direct=False, replace=True)

    def open_positional(self, key: str, size: int) -> LocalWriter:
        """Start a blob of `size` bytes under a new key, whose parts are written in any order."""
        return self._writer(key, size, direct=self._direct, replace=False)

    def _writer(self, key: str, size: int | None, *, direct: bool, replace: bool) -> LocalWriter:
        parts = validate_key(key).split("/")
        with translated(key, size or 0):
            staged = StagedFile(self._system, self._staging_folder(), key, direct=direct)
            writer = LocalWriter(key, staged, self._destination(parts), replace=replace)
            try:
                staged.reserve(size or 0)
            except OSError:
                writer.abort()
                raise
        return writer

    def _destination(self, parts: Sequence[str]) -> Destination:
        @contextlib.contextmanager
        def open_folder() -> Iterator[tuple[int, str]]:
            folder = self._make_folder(parts[:-1])
            try:
                yield folder, parts[-1]
            finally:
                os.close(folder)

        return open_folder

    def read(self, key: str) -> bytes:
        """The bytes of a blob; `NotFoundError` if there is none."""
        with self._opened(key) as file:
            content = bytearray(os.fstat(file).st_size)
            RangeReader(key, file, (0, len(content))).fill(memoryview(content))
            return bytes(content)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the blob's bytes from `offset`."""
        target = flat(buffer)
        with self.open_range(key, offset, len(target)) as reader:
            reader.fill(target)

    def is_cached(self, key: str) -> bool:
        """Whether at least half of a blob is in the page cache."""
        with self._opened(key) as file:
            return bool(is_cached(file, 0, os.fstat(file).st_size))

    @contextlib.contextmanager
    def open_range(self, key: str, offset: int, length: int) -> Iterator[RangeReader]:
        """Open a range that one thread reads from its start to its end.

        Cached parts are read from the page cache; the rest is read directly, because filling the cache
        with a checkpoint costs more than reading the checkpoint.
        """
        with self._opened(key) as file, contextlib.ExitStack() as stack:
            check_range(key, offset, length, os.fstat(file).st_size)
            is_small = not self._direct or length <= _SMALL_READ
            cached = True if is_small else is_cached(file, offset, length)
            direct = None
            if not cached:
                with contextlib.suppress(NotFoundError, UnavailableError):
                    direct = stack.enter_context(self._opened(key, os.O_DIRECT))
            span = offset, offset + length
            yield RangeReader(key, file, span, direct=direct, peeks=cached is None)

    def stat(self, key: str) -> BlobInfo:
        """The size and time of a blob; `NotFoundError` if there is none."""
        with self._opened(key) as file:
            return info_of(key, os.fstat(file))

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob whose key starts with `prefix`, in order of keys."""
        self._check_open()
        with translated(self.url):
            return iter(sorted(_walk(self.root, "", prefix), key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Remove a blob and the folders that become empty; a missing blob is not an error."""
        parts = validate_key(key).split("/")
        self._check_open()
        with translated(key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folder = self._open_folder(parts[:-1])
            try:
                self._system.unlink(parts[-1], folder)
                self._system.sync(folder)
            except IsADirectoryError:
                return
            finally:
                os.close(folder)
            self._prune(parts[:-1])

    def sweep(self) -> int:
        """Remove the staged files of writers that died; those of live writers are locked and stay."""
        self._check_open()
        with translated(self.url):
            try:
                staging = self._open_folder([STAGING])
            except FileNotFoundError:
                return 0
            try:
                return sum(self._sweep_one(staging, name) for name in os.listdir(staging))  # noqa: PTH208  by descriptor
            finally:
                os.close(staging)

    def _sweep_one(self, staging: int, name: str) -> bool:
        try:
            file = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=staging)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._system.unlink(name, staging)
            return True
        except (BlockingIOError, FileNotFoundError):
            return False
        finally:
            os.close(file)

    def close(self) -> None:
        """Close the staging folder; closing again changes nothing."""
        with self._lock:
            self._closed = True
            if self._staging >= 0:
                os.close(self._staging)
                self._staging = -1

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the store {self.url} was closed")

    def _staging_folder(self) -> int:
        with self._lock:
            self._check_open()
            if self._staging < 0:
                self._make_root()
                self._staging = self._make_folder([STAGING])
            return self._staging

    def _make_root(self) -> None:
        missing = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
            parent = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._system.sync(parent)
            finally:
                os.close(parent)

    @contextlib.contextmanager
    def _opened(self, key: str, flags: int = 0) -> Iterator[int]:
        parts = validate_key(key).split("/")
        self._check_open()
        with translated(f"{self.url}: {key}"):
            folder = self._open_folder(parts[:-1])
            try:
                file = os.open(parts[-1], _FILE | flags, dir_fd=folder)
            finally:
                os.close(folder)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise NotFoundError(f"{self.url}: {key} is not a blob")
                yield file
            finally:
                os.close(file)

    def _open_folder(self, parts: Sequence[str]) -> int:
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parts:
            folder = _enter(folder, part)
        return folder

    def _make_folder(self, parts: Sequence[str]) -> int:
        for _ in range(_ATTEMPTS):
            try:
                return self._try_make_folder(parts)
            except FileNotFoundError:
                continue  # another process removed the empty folder that was just made or entered
        raise ConflictError(f"{self.url}: {'/'.join(parts)} keeps being removed by another process")

    def _try_make_folder(self, parts: Sequence[str]) -> int:
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parts:
            try:
                try:
                    self._system.make_folder(part, folder)
                    self._system.sync(folder)
                except FileExistsError:
                    pass
            except OSError:
                os.close(folder)
                raise
            folder = _enter(folder, part)
        return folder

    def _prune(self, parts: Sequence[str]) -> None:
        while parts:
            folder = self._open_folder(parts[:-1])
            try:
                self._system.remove_folder(parts[-1], folder)
            except OSError:
                return  # not empty, or already removed
            finally:
                os.close(folder)
            parts = parts[:-1]


def _enter(folder: int, part: str) -> int:
    """Open a folder inside `folder`, and close `folder`."""
    try:
        return os.open(part, _FOLDER, dir_fd=folder)
    finally:
        os.close(folder)


def _walk(folder: Path, key: str, prefix: str) -> Iterator[BlobInfo]:
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        name = f"{key}{entry.name}"
        if entry.is_symlink() or (not key and entry.name == STAGING):
            continue
        if entry.is_dir(follow_symlinks=False):
            inside = f"{name}/"
            if inside.startswith(prefix) or prefix.startswith(inside):
                yield from _walk(folder / entry.name, inside, prefix)
        elif name.startswith(prefix) and entry.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError, TensorForgeError):
                yield info_of(validate_key(name), entry.stat(follow_symlinks=False))
