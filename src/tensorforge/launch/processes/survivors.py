"""Whether a member that the journal names can still be alive: what a new launch must know of the last one."""

from __future__ import annotations

import socket

import psutil

from tensorforge.elastic.coordinator.journal_records import Seat
from tensorforge.elastic.protocol.access import is_loopback


def is_gone(seat: Seat, host: str) -> bool:
    """Whether the member's process is known to have ended; one on another machine never is.

    `host` is where this machine's workers reach the coordinator.
    """
    hostname = seat.worker.hostname
    if seat.pid is None or not (is_loopback(hostname) or hostname == host):
        return False
    try:
        process = psutil.Process(int(seat.pid))
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        # Whoever is given no name takes this one: see `ElasticMembership.from_environment`.
        unnamed = f"{socket.gethostname()}-{seat.pid}"
        return process.environ().get("TENSORFORGE_WORKER_ID", unnamed) != seat.worker.id
    except psutil.NoSuchProcess:
        return True
    except (psutil.AccessDenied, OSError, ValueError):
        return False
