"""Whether the process of a member in the journal has ended, for a launch that continues an earlier one."""

from __future__ import annotations

import socket

import psutil

from tensorforge.elastic.coordinator.machine.journal_records import Seat
from tensorforge.elastic.protocol.access import is_loopback


def is_gone(seat: Seat, host: str) -> bool:
    """Whether the member's process has certainly ended; `False` for a process on another machine.

    `host`: the address at which this machine's workers reach the coordinator.
    """
    hostname = seat.worker.hostname
    if seat.pid is None or not (is_loopback(hostname) or hostname == host):
        return False
    try:
        process = psutil.Process(int(seat.pid))
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        # The default name of a worker: see `ElasticMembership.from_environment`.
        unnamed = f"{socket.gethostname()}-{seat.pid}"
        return process.environ().get("TENSORFORGE_WORKER_ID", unnamed) != seat.worker.id
    except psutil.NoSuchProcess:
        return True
    except (psutil.AccessDenied, OSError, ValueError):
        return False
