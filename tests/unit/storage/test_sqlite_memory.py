"""SQLite's statistics of memory: off only when nothing is open, and then nothing else changes."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import ctypes, _sqlite3, sqlite3, sys
from tensorforge.storage.sqlite_memory import stop_counting_memory

used = ctypes.CDLL(_sqlite3.__file__).sqlite3_memory_used
used.restype = ctypes.c_int64
place = sys.argv[1]
with sqlite3.connect(place) as database:
    database.execute("CREATE TABLE t (x)")
    assert not stop_counting_memory(), "a connection is open"
    database.execute("INSERT INTO t VALUES (1)")
    assert used() > 0
database.close()
assert stop_counting_memory()
database = sqlite3.connect(place)
assert database.execute("SELECT x FROM t").fetchall() == [(1,)]
assert used() == 0, "it still counts"
"""


def test_it_is_switched_off_once_no_connection_is_open(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "some.db")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
