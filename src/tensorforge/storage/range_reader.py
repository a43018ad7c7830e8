"""Reads a range of a file: cached parts from the page cache, the rest with direct reads."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable

from tensorforge.errors import EncodingError
from tensorforge.storage.staged_file import DIRECT_ALIGNMENT

_BOUNCE = 1 << 20
"""Bytes per direct read, few enough to be still in the processor's cache when they are copied."""

_PIECE = 256 << 10
"""Bytes per read from the page cache, few enough to be hashed in the core's own cache."""

_CACHESTAT = 451
"""The number of the system call `cachestat` on every architecture; Linux has it since 6.5."""

_PAGE = mmap.PAGESIZE
_HUGE_PAGE = 2 << 20


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStatistics(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent")
    )


_system = ctypes.CDLL(None, use_errno=True)


def is_cached(file: int, offset: int, length: int) -> bool | None:
    """Whether at least half of a range is in the page cache; `None` if the system cannot tell.

    A read with `RWF_NOWAIT` is no substitute for this call: it starts read-ahead into the cache.
    """
    found = _CacheStatistics()
    place = _Range(offset, length)
    if _system.syscall(_CACHESTAT, file, ctypes.byref(place), ctypes.byref(found), 0):
        return None
    return bool(2 * found.cached * _PAGE >= length)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class _Bounce(threading.local):
    """An aligned buffer per thread for direct reads, kept because new pages are slow.

    It is one huge page if the system has any: a disk needs several requests to fill scattered pages.
    """

    def __init__(self) -> None:
        memory = mmap.mmap(-1, 2 * _HUGE_PAGE)
        with contextlib.suppress(OSError, AttributeError):  # not available on this system
            memory.madvise(mmap.MADV_HUGEPAGE)
        skip = -_address(memoryview(memory)) % _HUGE_PAGE
        self.view = memoryview(memory)[skip : skip + _BOUNCE]
        self.address = _address(self.view)
        self.reader: RangeReader | None = None


_bounce = _Bounce()


OnPiece = Callable[[memoryview], object]


def _ignore(_piece: memoryview) -> None:
    pass


class RangeReader:
    """Reads a range of a file sequentially, one buffer after the other.

    `direct` is the same file opened for direct reads, or `None`. With `peeks`, cached bytes at the front are
    read from the page cache first.
    """

    def __init__(
        self,
        key: str,
        file: int,
        span: tuple[int, int],
        *,
        direct: int | None = None,
        peeks: bool = False,
    ) -> None:
        self._key = key
        self._file = file
        self._at, self._stop = span
        self._direct = direct
        self._peeks = peeks
        self._ready = self._bounced_from = 0

    def fill(self, target: memoryview, on_piece: OnPiece = _ignore) -> None:
        """Fill `target` with the next bytes; `EncodingError` if the file ends before.

        `on_piece` is called with each piece, in order, while it is in the processor's cache.
        """
        done = self._fill_from_cache(target, on_piece) if self._peeks else 0
        if self._direct is not None:
            done += self._fill_directly(self._direct, target[done:], on_piece)
        if done < len(target):
            self._fill_plainly(target[done:], on_piece)

    def _fill_plainly(self, target: memoryview, on_piece: OnPiece) -> None:
        # This loop runs thousands of times per gigabyte, with cold caches: keep it short.
        at, file, preadv = self._at, self._file, os.preadv
        for start in range(0, len(target), _PIECE):
            piece = target[start : start + _PIECE]
            if preadv(file, (piece,), at + start) != len(piece):
                self._complete(piece, at + start)
            on_piece(piece)
        self._at = at + len(target)

    def _complete(self, piece: memoryview, at: int) -> None:
        """Read a piece again after a short read."""
        done = 0
        while done < len(piece):
            count = os.preadv(self._file, (piece[done:],), at + done)
            if not count:
                raise EncodingError(f"{self._key} ended while it was read: it is truncated")
            done += count

    def _fill_from_cache(self, target: memoryview, on_piece: OnPiece) -> int:
        """Fill the front of `target` with bytes from the page cache; return how many there were."""
        done = 0
        while done < len(target):
            part = target[done : done + _PIECE]
            try:
                count = os.preadv(self._file, (part,), self._at, os.RWF_NOWAIT)
            except OSError:
                count = 0  # not cached, or the file system cannot tell
            if not count:
                self._peeks = False
                break
            on_piece(part[:count])
            self._at += count
            done += count
        return done

    def _fill_directly(self, direct: int, target: memoryview, on_piece: OnPiece) -> int:
        """Fill the front of `target` with direct reads; return how many bytes they gave."""
        done = 0
        while done < len(target):
            source = self._next_bytes(direct)
            if source is None:
                break
            count = min(self._ready, len(target) - done)
            part = target[done : done + count]
            # Unlike slice assignment, `memmove` releases the interpreter lock.
            ctypes.memmove(_address(part), source, count)
            on_piece(part)
            self._ready -= count
            self._at += count
            done += count
        return done

    def _next_bytes(self, direct: int) -> int | None:
        """The address of the next `_ready` bytes; `None` if direct reads do not work."""
        if not self._ready or _bounce.reader is not self:
            self._read_directly(direct)
        return _bounce.address + self._at - self._bounced_from if self._ready else None

    def _read_directly(self, direct: int) -> None:
        start = self._at // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
        wanted = min(_BOUNCE, -(-(self._stop - start) // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT)
        _bounce.reader, self._bounced_from = self, start
        try:
            count = os.preadv(direct, (_bounce.view[:wanted],), start)
        except OSError:
            count = 0  # an ordinary read will report the error
        self._ready = max(0, count - (self._at - start))
        if not self._ready:
            self._direct = None
