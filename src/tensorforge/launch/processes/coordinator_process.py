"""The coordinator as a child of the launcher: `python -m tensorforge.launch.processes.coordinator_process`.

It takes its settings from one environment variable, reports its address to the launcher, and serves until
SIGTERM. Started again on the same journal, it continues the same run.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.elastic.protocol.access import ROLES
from tensorforge.elastic.protocol.token_files import load_or_issue
from tensorforge.encoding import decode, encode
from tensorforge.environment import COORDINATOR_SETTINGS, for_child
from tensorforge.errors import TensorForgeError
from tensorforge.launch.processes.bootstrap import Reporter, die_with_launcher
from tensorforge.launch.processes.survivors import is_gone
from tensorforge.security import TokenStore

LEASE_SECONDS = 2.0
"""Short, because the launcher's lock on the folder excludes another coordinator of this run."""

_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """The settings that the launcher passes to the coordinator's process."""

    config: ElasticTrainingConfig
    host: str
    port: int
    journal: str
    run_id: str
    desired_workers: int
    token_file: str | None = None

    def to_environment(self) -> dict[str, str]:
        """The environment variable that carries the settings."""
        return for_child({COORDINATOR_SETTINGS: encode(self)})

    @classmethod
    def from_environment(cls) -> CoordinatorSettings:
        """Read the settings that the launcher passed; the variable is removed."""
        return decode(COORDINATOR_SETTINGS.take(), cls)


def serve(settings: CoordinatorSettings, reporter: Reporter) -> None:
    """Serve until SIGTERM. If the coordinator steps down because of an error, raise the error."""
    # Imported here because it loads the database, which the launcher does not need.
    from tensorforge.elastic.coordinator.coordinator import ElasticCoordinator

    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with ElasticCoordinator(
        settings.config,
        host=settings.host,
        port=settings.port,
        database=Path(settings.journal),
        run_id=settings.run_id,
        desired_workers=settings.desired_workers,
        tokens=_tokens(settings.token_file),
        resume=True,
        is_gone=lambda seat: is_gone(seat, settings.host),
        lease_seconds=LEASE_SECONDS,
        lease_wait=LEASE_SECONDS + 8.0,
    ) as coordinator:
        reporter.report("serving", address=coordinator.address)
        while not stopped.wait(_LOOK_SECONDS):
            coordinator.require_running()


def _tokens(path: str | None) -> TokenStore | None:
    if path is None:
        return None
    store = TokenStore()
    load_or_issue(store, Path(path), "run", ROLES)
    return store


def main() -> int:
    """Run the coordinator; print a `TensorForgeError` and return 1."""
    die_with_launcher()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    reporter = Reporter.from_environment()
    try:
        serve(CoordinatorSettings.from_environment(), reporter)
    except TensorForgeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
