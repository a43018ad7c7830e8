"""What is launched, with which options, and in which folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tensorforge import environment
from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.errors import ConfigurationError, InvalidInputError, NotFoundError
from tensorforge.launch.device_slots import DeviceSlots
from tensorforge.launch.processes.preload import find_script, preloads
from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy
from tensorforge.validation import whole_number

JOURNAL_FILE = "journal.db"
LOGS_FOLDER = "logs"
WORKERS_FOLDER = "workers"
MOST_SPARES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """One launch: the script with its arguments, the cluster's options and the supervisor's.

    `as_module`: `script` is the name of a module, as after `python -m`.
    `run_dir`: the folder of journal, logs and checkpoints; made if missing. A launch in the folder of an
    interrupted run continues that run.
    `host`, `port`: where the coordinator listens; beyond loopback, everybody needs the token in `run_dir`.
    `environment`: variables to add to the workers' environment.
    `spares`: how many processes with the script's heavy imports done wait to become the next workers.
    `gpus_per_worker`: how many devices of its own each local worker sees; 0: all workers see all. If it is
    not 0 there are no spares, because a process gets its devices when it starts.
    """

    script: str
    arguments: tuple[str, ...] = ()
    as_module: bool = False
    run_dir: Path
    config: ElasticTrainingConfig = field(default_factory=ElasticTrainingConfig)
    policy: SupervisionPolicy = field(default_factory=SupervisionPolicy)
    host: str = "127.0.0.1"
    port: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    spares: int = 1
    gpus_per_worker: int = 0

    def __post_init__(self) -> None:
        whole_number("spares", self.spares, least=0, most=MOST_SPARES)
        DeviceSlots(self.gpus_per_worker, os.environ).require(
            self.policy.workers + self.policy.standbys
        )
        whole_number("port", self.port, least=0, most=65_535)
        if not self.as_module:
            require_script(self.script)
        if self.host in ("", "0.0.0.0", "::", "[::]"):  # noqa: S104  refused, not used
            rule = "is no address; name the one under which other machines reach this one"
            raise ConfigurationError("host", self.host, rule)
        same = (
            ("min_workers", self.config.min_workers, self.policy.min_workers),
            ("max_workers", self.config.max_workers, self.policy.max_workers),
        )
        for name, cluster, supervisor in same:
            if cluster != supervisor:
                rule = f"must be the same in config and policy ({supervisor})"
                raise ConfigurationError(name, cluster, rule)

    def worker_words(self) -> tuple[str, ...]:
        """The arguments of a worker's bootstrap."""
        if self.as_module:
            return ("-m", self.script, *self.arguments)
        return (str(Path(self.script).absolute()), *self.arguments)

    def preloads(self) -> tuple[str, ...]:
        """The modules that a spare imports; if there are none, no spare is started."""
        has_spares = self.spares and not self.gpus_per_worker
        path = find_script(self.script, as_module=self.as_module) if has_spares else None
        try:
            return () if path is None else preloads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            return ()

    def worker_variables(self, worker: str, coordinator: str, token: str | None) -> dict[str, str]:
        """The variables that a worker's process has in addition to those of its machine."""
        return {
            "PYTHONUNBUFFERED": "1",
            **self.environment,
            **worker_environment(worker, coordinator, self.run_dir, token),
        }


def bootstrap_command(
    python: str, script: str, arguments: Sequence[str], *, as_module: bool
) -> list[str]:
    """The command line of a process that runs the script in the bootstrap."""
    flag = ["-m"] if as_module else []
    return [python, "-m", "tensorforge.launch.processes.bootstrap", *flag, script, *arguments]


def require_script(script: str) -> None:
    """Raise if the script is a folder or does not exist."""
    if Path(script).is_dir():
        raise InvalidInputError(f"{script} is a folder; name the script in it, or a module with -m")
    if not Path(script).is_file():
        raise NotFoundError(f"the script {script} does not exist")


def worker_environment(
    worker: str,
    coordinator: str,
    run_dir: Path,
    token: str | None,
) -> dict[str, str]:
    """The variables that tell training code its run, its name and the coordinator, which has the rest."""
    return environment.for_child(
        {
            environment.COORDINATOR: coordinator,
            environment.WORKER_ID: worker,
            environment.RUN_DIR: run_dir.absolute(),
            environment.TOKEN: token,
        }
    )
