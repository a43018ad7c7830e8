"""Whether the process of a member in the journal has ended, for a launch that continues an earlier one."""

from __future__ import annotations

from tensorforge.elastic.coordinator.journal_records import Seat
from tensorforge.elastic.protocol.access import is_loopback
from tensorforge.processes import ProcessIdentity


def is_gone(seat: Seat, host: str) -> bool:
    """Whether the member's process has certainly ended; `False` for a process on another machine.

    `host`: the address at which this machine's workers reach the coordinator.
    """
    hostname = seat.worker.hostname
    process = _process(seat)
    if process is None or not (is_loopback(hostname) or hostname == host):
        return False
    return not process.is_running()


def _process(seat: Seat) -> ProcessIdentity | None:
    """The member's process; a journal of an older version knows only its number."""
    if seat.process is not None:
        return ProcessIdentity.from_text(seat.process)
    number = seat.pid or ""
    return ProcessIdentity.of(int(number)) if number.isdecimal() else None
