"""Switches off SQLite's memory statistics, which slow down processes with several threads.

For these statistics every allocation takes one lock, so that two threads with two connections are slower than
one. SQLite's manual advises to build it without them; the usual builds have them, and Python's module has no
switch.
"""

from __future__ import annotations

import ctypes
import importlib

_SQLITE_OK, _SQLITE_CONFIG_MEMSTATUS = 0, 9


def stop_counting_memory() -> bool:
    """Switch the statistics off for this process and its forks; return whether that succeeded.

    It fails while a connection is open, because SQLite must be initialized again, and if SQLite's functions
    are not accessible through Python's module.
    """
    try:
        library = ctypes.CDLL(importlib.import_module("_sqlite3").__file__)
        memory_used, configure = library.sqlite3_memory_used, library.sqlite3_config
        shutdown, initialize = library.sqlite3_shutdown, library.sqlite3_initialize
    except (ImportError, OSError, TypeError, AttributeError):
        return False
    memory_used.restype = ctypes.c_int64
    configure.argtypes = [ctypes.c_int]  # further arguments are variadic
    if memory_used() or shutdown() != _SQLITE_OK:
        return False
    configured = configure(_SQLITE_CONFIG_MEMSTATUS, ctypes.c_int(0))
    return bool(initialize() == configured == _SQLITE_OK)
