"""A training cluster for fault tests: a coordinator and workers as real processes of this machine.

The processes are forked from a server process that has only imported torch, so they start in milliseconds. What
the workers did is read from their run logs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

from tensorforge.cluster.elastic_config import AdaptationStrategy, ElasticTrainingConfig
from tensorforge.cluster.ended_runs import exit_code_of_runs
from tensorforge.elastic.protocol.access import ROLES, is_loopback
from tensorforge.elastic.protocol.token_files import load_or_issue
from tensorforge.errors import DeadlineExceededError
from tensorforge.launch.launch_settings import worker_environment
from tensorforge.security import TokenStore
from tensorforge.train.run_log import read_run_logs

PRELOADED = (
    "torch",
    "torch._dynamo",
    "tensorforge.train.loop.run",
    "tensorforge.elastic.coordinator.coordinator",
)
_POLL_SECONDS = 0.01

Main = Callable[..., None]


def forking_context() -> ForkServerContext:
    """A context whose processes have torch imported; its server starts with the first process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


class TrainingCluster:
    """Runs `main(*arguments)` in every worker, with the environment that a launcher would set.

    A context manager: on exit all processes that still run are killed. On a `host` other than loopback, all
    processes use a job token.
    """

    def __init__(
        self,
        main: Main,
        arguments: tuple[Any, ...],
        folder: Path,
        *,
        config: ElasticTrainingConfig | None = None,
        desired_workers: int | None = None,
        lease_seconds: float = 0.5,
        environment: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.folder = folder
        self.config = config or ElasticTrainingConfig(
            lr_adaptation_strategy=AdaptationStrategy.NONE
        )
        self.address = f"{host}:{_free_port(host)}"
        self._token_file = None if is_loopback(host) else folder / "job.token"
        self.token: str | None = None
        self._main = main
        self._arguments = arguments
        self._desired_workers = desired_workers
        self._lease_seconds = lease_seconds
        self._environment = dict(environment or {})
        self._context = forking_context()
        self._coordinator: BaseProcess | None = None
        self.workers: dict[str, BaseProcess] = {}
        self.frozen: set[str] = set()

    def __enter__(self) -> Self:
        self.start_coordinator()
        return self

    def __exit__(self, *_: object) -> None:
        everybody = [*self.workers.values(), *filter(None, [self._coordinator])]
        for process in everybody:
            process.kill()
        for process in everybody:
            process.join()
            process.close()

    def start_coordinator(self) -> None:
        """Start the coordinator, or start it again on its journal and port."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._token_file is not None:
            self.token = load_or_issue(TokenStore(), self._token_file, "job", ROLES)
        host, _, port = self.address.rpartition(":")
        settings = {
            "config": self.config,
            "host": host,
            "port": int(port),
            "database": str(self.folder / "meta.db"),
            "desired_workers": self._desired_workers,
            "lease_seconds": self._lease_seconds,
        }
        log = str(self.folder / "coordinator.log")
        self._coordinator = self._context.Process(
            target=_run_coordinator, args=(settings, self._token_file, log)
        )
        self._coordinator.start()

    def kill_coordinator(self) -> None:
        """Send SIGKILL to the coordinator and wait for its exit."""
        if self._coordinator is not None:
            self._coordinator.kill()
            self._coordinator.join()
            self._coordinator.close()
            self._coordinator = None

    def start_worker(self, name: str) -> None:
        """Start a worker, which joins by itself."""
        environment = {
            **worker_environment(name, self.address, self.folder, self.token),
            **self._environment,
        }
        log = str(self.folder / f"{name}.log")
        process = self._context.Process(
            target=_run_worker, args=(environment, log, self._main, self._arguments)
        )
        process.start()
        self.workers[name] = process

    def kill(self, name: str) -> None:
        """Send SIGKILL to a worker and wait for its exit."""
        self._signal(name, signal.SIGKILL)
        self.workers.pop(name).join()
        self.frozen.discard(name)

    def freeze(self, name: str) -> None:
        """Stop a worker's process with SIGSTOP."""
        self._signal(name, signal.SIGSTOP)
        self.frozen.add(name)

    def thaw(self, name: str) -> None:
        """Continue a frozen worker with SIGCONT."""
        self._signal(name, signal.SIGCONT)
        self.frozen.discard(name)

    def ask_to_leave(self, name: str) -> None:
        """Ask a worker to leave with SIGTERM."""
        self._signal(name, signal.SIGTERM)

    def _signal(self, name: str, number: signal.Signals) -> None:
        pid = self.workers[name].pid
        if pid is not None:
            os.kill(pid, number)

    def events(self) -> list[dict[str, Any]]:
        """The lines of all run logs, in the order of time."""
        return read_run_logs(self.folder)

    def finals(self) -> dict[str, dict[str, Any]]:
        """The final log line of each worker that ended by itself."""
        return {event["worker"]: event for event in self.events() if event["kind"] == "final"}

    def committed_step(self) -> int:
        """The newest committed step; -1 before the first."""
        return max((e["step"] for e in self.events() if e["kind"] == "commit"), default=-1)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
        """Wait until `condition` holds; raise `DeadlineExceededError` with the logs after `timeout`."""
        if not _happens(condition, timeout):
            raise DeadlineExceededError(
                f"{what} did not happen within {timeout:g} s\n{self.describe()}"
            )

    def wait_for_step(self, step: int, timeout: float = 60.0, *, strict: bool = True) -> None:
        """Wait until `step` is committed or no worker runs; if not `strict`, a timeout is no error."""

        def is_there() -> bool:
            return self.committed_step() >= step or not self.living()

        if strict:
            self.wait_until(is_there, f"step {step}", timeout)
        else:
            _happens(is_there, timeout)

    def wait_for_end(self, timeout: float = 60.0) -> None:
        """Wait until every worker that is not frozen has ended."""
        self.wait_until(lambda: not self.living(), "the end of the run", timeout)

    def living(self) -> set[str]:
        """The workers that run and are not frozen."""
        return {n for n, p in self.workers.items() if p.is_alive() and n not in self.frozen}

    def exit_codes(self) -> dict[str, int | None]:
        """The exit codes of the workers that were not killed."""
        return {name: process.exitcode for name, process in self.workers.items()}

    def describe(self) -> str:
        """The ends of all logs, and the stacks of the workers, to explain a failed test.

        Only for that: dumping the stacks of running threads can crash a process.
        """
        for name in self.living():
            self._signal(name, signal.SIGUSR1)
        time.sleep(0.2)
        lines = [f"living: {sorted(self.living())}, frozen: {sorted(self.frozen)}"]
        for path in sorted(self.folder.glob("*.log")):
            lines += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-25:]]
        return "\n".join(lines)


def _happens(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not (is_there := condition()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return is_there


def _run_coordinator(settings: dict[str, Any], token_file: Path | None, log: str) -> None:
    from tensorforge.elastic.coordinator.coordinator import ElasticCoordinator

    with _logged(log):
        tokens = None if token_file is None else TokenStore()
        if tokens is not None and token_file is not None:
            load_or_issue(tokens, token_file, "job", ROLES)
        coordinator = ElasticCoordinator(
            **settings,
            tokens=tokens,
            lease_wait=30.0,
            on_note=lambda note: print(time.time(), note, flush=True),  # noqa: T201
        )
        with coordinator:
            coordinator.wait_until_ended()
            time.sleep(60)  # late workers learn of the end, until the test kills this process


def _run_worker(
    environment: dict[str, str], log: str, main: Main, arguments: tuple[Any, ...]
) -> None:
    import faulthandler

    os.environ.update(environment)
    with _logged(log):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        main(*arguments)
        sys.exit(exit_code_of_runs())


@contextmanager
def _logged(path: str) -> Iterator[None]:
    """Write standard output, standard error and the logging of this process to a file."""
    import logging
    import sys

    file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115  until the process ends
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=file)
    yield


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
