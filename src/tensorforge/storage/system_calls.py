"""The system calls by which a local store changes the disk, and the translation of their errors.

Tests that simulate a crash between two calls, a full disk or a slow disk pass a subclass of `SystemCalls`.
"""

from __future__ import annotations

import errno
import os

from tensorforge.errors import (
    CapacityError,
    ConflictError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    TensorForgeError,
    UnavailableError,
)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_WRONG_KIND = {errno.ENOTDIR, errno.EISDIR}


class SystemCalls:
    """The calls that write, rename, sync or unlink; each method is one system call."""

    def create(self, name: str, flags: int, folder: int) -> int:
        """Create a new file and open it."""
        return os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)

    def make_folder(self, name: str, folder: int) -> None:
        """Create a folder."""
        os.mkdir(name, dir_fd=folder)

    def write(self, file: int, data: memoryview) -> int:
        """Write at the file's position."""
        return os.write(file, data)

    def write_at(self, file: int, data: memoryview, offset: int) -> int:
        """Write at `offset`."""
        return os.pwrite(file, data, offset)

    def reserve(self, file: int, size: int) -> None:
        """Reserve room for a file before it is written."""
        os.posix_fallocate(file, 0, size)

    def truncate(self, file: int, size: int) -> None:
        """Truncate a file."""
        os.ftruncate(file, size)

    def sync(self, file: int) -> None:
        """Make a file's bytes, or a folder's names, durable."""
        os.fsync(file)

    def link(self, source: str, source_folder: int, name: str, folder: int) -> None:
        """Give a file a second name; fails if the name is taken."""
        os.link(source, name, src_dir_fd=source_folder, dst_dir_fd=folder, follow_symlinks=False)

    def replace(self, source: str, source_folder: int, name: str, folder: int) -> None:
        """Rename a file, replacing another one."""
        os.replace(source, name, src_dir_fd=source_folder, dst_dir_fd=folder)

    def unlink(self, name: str, folder: int) -> None:
        """Remove a file's name."""
        os.unlink(name, dir_fd=folder)

    def remove_folder(self, name: str, folder: int) -> None:
        """Remove an empty folder."""
        os.rmdir(name, dir_fd=folder)


def translate(error: OSError, what: str, requested: int = 0) -> TensorForgeError:
    """The `TensorForgeError` for an error of the operating system; `what` names the blob."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return CapacityError(
            f"{what}: no room on the disk ({reason}); free some space and try again",
            requested=requested,
            available=0,
        )
    if error.errno in _FORBIDDEN:
        return PermissionDeniedError(f"{what}: the system forbids it ({reason})")
    if error.errno == errno.ELOOP:
        return PermissionDeniedError(
            f"{what}: the path contains a symbolic link, which stores do not follow"
        )
    if error.errno == errno.ENOENT:
        return NotFoundError(f"{what}: there is no such blob")
    if error.errno in _WRONG_KIND:
        return ConflictError(f"{what}: one key is the folder of another ({reason})")
    if error.errno == errno.ENAMETOOLONG:
        return InvalidInputError(f"{what}: the key is too long for this file system")
    return UnavailableError(f"{what}: {reason}")
