"""A coordinator process and worker processes without tensors, which tests can kill, freeze and disconnect.

Workers run `tensorforge.testing.minimal_worker`; each logs its events to a file of its own. `close` ends all
processes, also after a failed test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.elastic.client import CoordinatorClient
from tensorforge.elastic.protocol.access import is_loopback
from tensorforge.elastic.protocol.cluster_view import ClusterView
from tensorforge.elastic.protocol.token_files import read_token
from tensorforge.environment import TOKEN, for_child
from tensorforge.errors import DeadlineExceededError, UnavailableError

WAIT_SECONDS = 60.0
_POLL = 0.01


@dataclass
class WorkerProcess:
    """One worker in a process of its own."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def events(self) -> list[dict[str, Any]]:
        """The complete lines of the worker's log so far."""
        if not self.log.exists():
            return []
        lines = self.log.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        self.process.send_signal(number)

    def end(self) -> None:
        """Kill the process if it runs, and wait for its exit."""
        _end(self.process)


@dataclass
class ProcessCluster:
    """Starts, disturbs and observes processes. A context manager.

    On a `host` other than loopback, all processes use a job token.
    """

    folder: Path
    config: ElasticTrainingConfig
    desired_workers: int | None = None
    host: str = "127.0.0.1"
    coordinator: subprocess.Popen[bytes] | None = None
    address: str = ""
    workers: dict[str, WorkerProcess] = field(default_factory=dict)
    _client: CoordinatorClient | None = None

    def start_coordinator(self, port: int = 0) -> str:
        """Start the coordinator, or start it again on the same journal and port; return its address."""
        command = [
            *(sys.executable, "-m", "tensorforge", "coordinator", "--json"),
            *("--port", str(port), "--journal", str(self.folder / "journal.db")),
            *("--config", self._config(), "--host", self.host),
        ]
        if self._needs_token():
            command += ["--token-file", str(self._token_file())]
        if self.desired_workers is not None:
            command += ["--workers", str(self.desired_workers)]
        with (self.folder / "coordinator.log").open("ab") as log:
            self.coordinator = subprocess.Popen(  # noqa: S603  our own interpreter
                command, stdout=subprocess.PIPE, stderr=log, env=self._environment()
            )
        assert self.coordinator.stdout is not None  # noqa: S101  a pipe was asked for
        line = self.coordinator.stdout.readline()
        if not line:
            raise UnavailableError((self.folder / "coordinator.log").read_text()[-2000:])
        self.address = json.loads(line)["address"]
        return self.address

    def kill_coordinator(self) -> int:
        """Send SIGKILL to the coordinator; return its port."""
        assert self.coordinator is not None  # noqa: S101  the test must have started it
        _end(self.coordinator)
        self._drop_client()
        return int(self.address.rpartition(":")[2])

    def start_worker(
        self,
        name: str,
        *,
        address: str | None = None,
        prefix: tuple[str, ...] = (),
        module: tuple[str, ...] = ("-m", "tensorforge.testing.minimal_worker"),
    ) -> WorkerProcess:
        """Start a worker; `prefix` goes before its command line (a network namespace, say)."""
        log = self.folder / f"{name}.jsonl"
        command = [
            *prefix,
            *(sys.executable, *module),
            *("--coordinator", address or self.address, "--id", name),
            *("--config", self._config(), "--log", str(log)),
        ]
        with (self.folder / f"{name}.err").open("ab") as errors:
            process = subprocess.Popen(  # noqa: S603  our own interpreter
                command, stdout=errors, stderr=errors, env=self._environment() | self._token()
            )
        self.workers[name] = WorkerProcess(name, process, log)
        return self.workers[name]

    def status(self) -> ClusterView:
        """The coordinator's view of the cluster."""
        if self._client is None:
            token = read_token(self._token_file()) if self._needs_token() else None
            self._client = CoordinatorClient(self.address, token=token)
        return self._client.status()

    def members(self) -> list[str]:
        """The names of the members in the order of rank."""
        return [worker.id for worker in self.status().workers if worker.rank >= 0]

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until the condition holds; while the coordinator is unavailable it does not hold."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                if condition():
                    return
            except UnavailableError:
                self._drop_client()
            if time.monotonic() > deadline:
                raise DeadlineExceededError(f"not within {WAIT_SECONDS} s: {what}")
            time.sleep(_POLL)

    def wait_until_active(self, members: set[str]) -> ClusterView:
        """Wait until exactly these members have formed a generation and committed a step."""

        def is_active() -> bool:
            view = self.status()
            present = {worker.id for worker in view.workers if worker.rank >= 0}
            committed = view.rescales and view.rescales[-1].first_commit_ms is not None
            return view.phase == "active" and present == members and bool(committed)

        self.wait_until(is_active, f"{sorted(members)} train")
        return self.status()

    def close(self) -> None:
        """End all processes that were started."""
        self._drop_client()
        for worker in self.workers.values():
            worker.end()
        if self.coordinator is not None:
            _end(self.coordinator)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _needs_token(self) -> bool:
        return not is_loopback(self.host)

    def _token(self) -> dict[str, str]:
        return for_child({TOKEN: read_token(self._token_file())}) if self._needs_token() else {}

    def _token_file(self) -> Path:
        return self.folder / "job.token"

    def _config(self) -> str:
        return msgspec.json.encode(self.config).decode()

    @staticmethod
    def _environment() -> dict[str, str]:
        return {**os.environ, "PYTHONUNBUFFERED": "1", "GRPC_VERBOSITY": "NONE"}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
