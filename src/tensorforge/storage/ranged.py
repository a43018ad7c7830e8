"""Reading a range of a file: from the page cache what is there, the rest past it."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

from tensorforge.errors import EncodingError
from tensorforge.storage.staged import DIRECT_ALIGNMENT

_BOUNCE = 4 << 20


def read_exactly(key: str, file: int, offset: int, target: memoryview) -> None:
    """Fill `target` from `offset`; `EncodingError` if the file ends before."""
    while target:
        done = os.preadv(file, [target], offset)
        if not done:
            raise EncodingError(f"{key} ended while it was read: it was cut short")
        target, offset = target[done:], offset + done


def read_cached(file: int, offset: int, target: memoryview) -> int:
    """Read as much from the front as lies in the page cache; returns how many bytes it was."""
    done = 0
    while done < len(target):
        try:
            count = os.preadv(file, [target[done:]], offset + done, os.RWF_NOWAIT)
        except OSError:
            return done  # not cached, or a file system that cannot tell
        if not count:
            return done
        done += count
    return done


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class _Bounce(threading.local):
    """Each thread's aligned buffer for direct reads, kept because fresh pages are slow."""

    def __init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, _BOUNCE))
        self.address = _address(self.view)


_bounce = _Bounce()


def read_through_bounce(file: int, offset: int, target: memoryview) -> int:
    """Read from a file opened for direct access; returns how many bytes came."""
    done, address = 0, _address(target)
    while done < len(target):
        start = (offset + done) // DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
        skip = offset + done - start
        needed = skip + len(target) - done
        wanted = min(_BOUNCE, -(-needed // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT)
        count = os.preadv(file, [_bounce.view[:wanted]], start) - skip
        if count <= 0:
            return done
        count = min(count, len(target) - done)
        # Unlike slice assignment, this lets other threads run meanwhile.
        ctypes.memmove(address + done, _bounce.address + skip, count)
        done += count
    return done
