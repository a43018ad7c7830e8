"""The guard: a tiny process that outlives the launcher just long enough to end what it left behind.

The launcher writes `+GROUP` and `-GROUP` lines to the guard's standard input. When that pipe closes,
because the launcher ended in whatever way, the groups that are left are killed. This file is run as a
script with nothing but the standard library, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def remaining_groups(lines: Iterable[str]) -> set[int]:
    """The process groups that were added and not taken back; lines of another form are ignored."""
    groups: set[int] = set()
    for line in lines:
        sign, number = line[:1], line[1:].strip()
        if not number.isdecimal() or int(number) <= 1:
            continue
        if sign == "+":
            groups.add(int(number))
        elif sign == "-":
            groups.discard(int(number))
    return groups


def main() -> None:
    """Wait for the launcher's end, then kill what is left."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    for group in remaining_groups(sys.stdin):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
