"""The reaper: a small process that kills the process groups that a dead launcher left behind.

The launcher writes the lines `+GROUP` and `-GROUP` to the reaper's standard input. When the launcher ends, in
whatever way, that pipe closes and the reaper kills the groups that are left. It is run as a script with the
standard library only, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def remaining_groups(lines: Iterable[str]) -> set[int]:
    """The process groups that were added and not removed; other lines are ignored."""
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
    """Wait until the launcher ends, then kill the groups that are left."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    for group in remaining_groups(sys.stdin):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
