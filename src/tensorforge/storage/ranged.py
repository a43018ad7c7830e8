"""Reading a range of a file: from the page cache what is there, the rest past it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterator

from tensorforge.errors import EncodingError
from tensorforge.storage.staged import DIRECT_ALIGNMENT

_BOUNCE = 1 << 20
"""What is read directly at once: small enough to be in the processor's cache while it is copied on."""

_PIECE = 256 << 10
"""What is read from the page cache at once: it is hashed while it is in the core's own cache."""

_CACHESTAT = 451
"""The number of the system call, the same on every architecture; Linux has it since 6.5."""

_PAGE = mmap.PAGESIZE
_HUGE_PAGE = 2 << 20


def read_exactly(key: str, file: int, offset: int, target: memoryview) -> Iterator[memoryview]:
    """Fill `target` from `offset`, giving each piece; `EncodingError` if the file ends before."""
    done, total = 0, len(target)
    while done < total:
        piece = target[done : done + _PIECE]
        count = os.preadv(file, [piece], offset + done)
        if not count:
            raise EncodingError(f"{key} ended while it was read: it was cut short")
        yield piece if count == len(piece) else piece[:count]
        done += count


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStatistics(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent")
    )


_system = ctypes.CDLL(None, use_errno=True)


def is_cached(file: int, offset: int, length: int) -> bool | None:
    """Whether the greater part of a range lies in the page cache; `None` if the system does not tell.

    Asking by a read that must not wait is no substitute: it starts to read ahead into the cache.
    """
    found = _CacheStatistics()
    place = _Range(offset, length)
    if _system.syscall(_CACHESTAT, file, ctypes.byref(place), ctypes.byref(found), 0):
        return None
    return bool(2 * found.cached * _PAGE >= length)


def read_cached(file: int, offset: int, target: memoryview) -> Iterator[memoryview]:
    """Read as much from the front as lies in the page cache, giving each piece."""
    done = 0
    while done < len(target):
        try:
            part = target[done : done + _PIECE]
            count = os.preadv(file, [part], offset + done, os.RWF_NOWAIT)
        except OSError:
            return  # not cached, or a file system that cannot tell
        if not count:
            return
        yield target[done : done + count]
        done += count


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class _Bounce(threading.local):
    """Each thread's aligned buffer for direct reads, kept because fresh pages are slow.

    It is one huge page, if the system has any: a disk fills scattered ones by several requests.
    """

    def __init__(self) -> None:
        memory = mmap.mmap(-1, 2 * _HUGE_PAGE)
        with contextlib.suppress(OSError, AttributeError):  # not on this system
            memory.madvise(mmap.MADV_HUGEPAGE)
        skip = -_address(memoryview(memory)) % _HUGE_PAGE
        self.view = memoryview(memory)[skip : skip + _BOUNCE]
        self.address = _address(self.view)


_bounce = _Bounce()


def read_through_bounce(file: int, offset: int, target: memoryview) -> Iterator[memoryview]:
    """Read from a file opened for direct access as far as that works, giving each piece."""
    done = 0
    while done < len(target):
        start = (offset + done) // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
        skip = offset + done - start
        needed = skip + len(target) - done
        wanted = min(_BOUNCE, -(-needed // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT)
        count = os.preadv(file, [_bounce.view[:wanted]], start) - skip
        if count <= 0:
            return
        count = min(count, len(target) - done)
        part = target[done : done + count]
        # Unlike slice assignment, this lets other threads run meanwhile.
        ctypes.memmove(_address(part), _bounce.address + skip, count)
        yield part
        done += count
