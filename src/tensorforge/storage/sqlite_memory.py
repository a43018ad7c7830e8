"""SQLite without its statistics of memory, which cost a process with several threads more than they tell.

For them every allocation takes one lock, so that two threads with two connections are slower than one. SQLite's
own manual advises to build it without; the usual builds have them, and Python's module has no switch.
"""

from __future__ import annotations

import ctypes
import importlib

_SQLITE_OK, _SQLITE_CONFIG_MEMSTATUS = 0, 9


def stop_counting_memory() -> bool:
    """Switch the statistics off for this process and its forks; whether that could be done.

    Nothing happens while a connection is open, since SQLite has to be initialized anew, nor where its functions
    cannot be found behind Python's module.
    """
    try:
        library = ctypes.CDLL(importlib.import_module("_sqlite3").__file__)
        memory_used, configure = library.sqlite3_memory_used, library.sqlite3_config
        shutdown, initialize = library.sqlite3_shutdown, library.sqlite3_initialize
    except (ImportError, OSError, TypeError, AttributeError):
        return False
    memory_used.restype = ctypes.c_int64
    configure.argtypes = [ctypes.c_int]  # what comes after is variadic
    if memory_used() or shutdown() != _SQLITE_OK:
        return False
    configured = configure(_SQLITE_CONFIG_MEMSTATUS, ctypes.c_int(0))
    return bool(initialize() == configured == _SQLITE_OK)
