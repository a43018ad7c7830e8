"""Every environment variable that TensorForge reads or sets: its name, type, meaning and default.

No other module names a `TENSORFORGE_*` variable. A command line option that a variable can replace takes
the name from here; the launcher fills the environment of its children with `for_child`; everybody else
reads with `Variable.read`. An empty value counts as none.

Each variable is for one reader: the commands that a person calls (`USER`), a worker that is told about its
run (`WORKER`; the launcher sets them, or a person who starts a worker without it), a process that the
launcher started (`CHILD`), or the project's own tests (`TESTS`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar

from tensorforge.errors import ConfigurationError

Value = TypeVar("Value")


class Reader(Enum):
    """Whom a variable is for."""

    USER = "user"
    WORKER = "worker"
    CHILD = "child"
    TESTS = "tests"


@dataclass(frozen=True, slots=True)
class Kind(Generic[Value]):
    """A type of values: `rule` says which texts are one; `parse` raises `ValueError` for any other."""

    name: str
    rule: str
    parse: Callable[[str], Value]
    format: Callable[[Value], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable(Generic[Value]):
    """One environment variable. `default` is its value when it is not set; if there is none, `otherwise` says
    what happens then.
    """

    name: str
    kind: Kind[Value]
    reader: Reader
    meaning: str
    default: Value | None = None
    otherwise: str = ""

    def read(self, environment: Mapping[str, str] | None = None) -> Value | None:
        """The value in `environment` (by default this process's); if it is not set, or empty, the default.

        A text that is not of this kind is a `ConfigurationError`.
        """
        text = (os.environ if environment is None else environment).get(self.name, "")
        if not text:
            return self.default
        try:
            return self.kind.parse(text)
        except ValueError as error:
            raise ConfigurationError(self.name, text, self.kind.rule) from error

    def take(self) -> Value | None:
        """The value, which this process's own children do not inherit."""
        value = self.read()
        os.environ.pop(self.name, None)
        return value


def for_child(values: Mapping[Variable[Any], Any]) -> dict[str, str]:
    """The environment that tells these values to a child; those that are `None` are left out."""
    return {
        variable.name: variable.kind.format(value)
        for variable, value in values.items()
        if value is not None
    }


def _parse_address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(text)
    return text


def _parse_number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


TEXT: Kind[str] = Kind("text", "any text", str, str)
ADDRESS: Kind[str] = Kind("HOST:PORT", "must be HOST:PORT", _parse_address, str)
PATH: Kind[Path] = Kind("path", "any path", Path, str)
NUMBER: Kind[int] = Kind("number", "must be a whole number, at least 0", _parse_number, str)
NAMES: Kind[tuple[str, ...]] = Kind("names", "names separated by commas", _parse_names, ",".join)
JSON: Kind[Any] = Kind("JSON", "must be JSON", json.loads, json.dumps)
FLAG: Kind[bool] = Kind("flag", "any text means yes", bool, lambda value: "1" * value)

COORDINATOR = Variable(
    name="TENSORFORGE_COORDINATOR",
    kind=ADDRESS,
    reader=Reader.WORKER,
    meaning="Where the run's coordinator listens. Training code that finds it joins that run. "
    "The commands take it in place of `--coordinator`.",
    otherwise="Training code trains alone, or as torchrun's variables say.",
)
WORKER_ID = Variable(
    name="TENSORFORGE_WORKER_ID",
    kind=TEXT,
    reader=Reader.WORKER,
    meaning="The worker's name, unique in its run.",
    otherwise="The host's name and the process number.",
)
HOST = Variable(
    name="TENSORFORGE_HOST",
    kind=TEXT,
    reader=Reader.WORKER,
    meaning="The address at which other workers reach this one.",
    otherwise="This machine's address on the way to the coordinator.",
)
CONFIG = Variable(
    name="TENSORFORGE_CONFIG",
    kind=JSON,
    reader=Reader.WORKER,
    meaning="An `ElasticTrainingConfig`, encoded as `tensorforge.encoding` does. The coordinator refuses a "
    "worker whose configuration is not the run's.",
    otherwise="The coordinator sends the run's configuration.",
)
RUN_DIR = Variable(
    name="TENSORFORGE_RUN_DIR",
    kind=PATH,
    reader=Reader.WORKER,
    meaning="The run's folder. Training code writes its run log below it.",
    otherwise="No run log is written.",
)
TOKEN = Variable(
    name="TENSORFORGE_TOKEN",
    kind=TEXT,
    reader=Reader.WORKER,
    meaning="The bearer token for the coordinator, and between workers; in place of `--token-file`.",
    otherwise="No token is sent.",
)
CA = Variable(
    name="TENSORFORGE_CA",
    kind=PATH,
    reader=Reader.WORKER,
    meaning="PEM file of the authority that signs the peers' certificates; in place of `--ca`.",
    otherwise="Without this and the next two, connections are not encrypted.",
)
CERT = Variable(
    name="TENSORFORGE_CERT",
    kind=PATH,
    reader=Reader.WORKER,
    meaning="PEM file of this side's certificate; in place of `--cert`.",
    otherwise="This side shows no certificate.",
)
KEY = Variable(
    name="TENSORFORGE_KEY",
    kind=PATH,
    reader=Reader.WORKER,
    meaning="PEM file of the key of `TENSORFORGE_CERT`; in place of `--key`.",
    otherwise="This side shows no certificate.",
)
STORE = Variable(
    name="TENSORFORGE_STORE",
    kind=TEXT,
    reader=Reader.USER,
    meaning="Folder or URL with the checkpoints' files; in place of `--store`.",
    default="./checkpoints",
)
CATALOG = Variable(
    name="TENSORFORGE_CATALOG",
    kind=TEXT,
    reader=Reader.USER,
    meaning="SQLite file or database URL of the checkpoint catalog; in place of `--catalog`.",
    default="./checkpoints.db",
)
REGISTRY = Variable(
    name="TENSORFORGE_REGISTRY",
    kind=TEXT,
    reader=Reader.USER,
    meaning="SQLite file or database URL of the model registry; in place of `--database`.",
    default="registry.db",
)
SECRETS_KEY = Variable(
    name="TENSORFORGE_SECRETS_KEY",
    kind=TEXT,
    reader=Reader.USER,
    meaning="The key that encrypts the registry's webhook secrets: any text with at least 16 characters.",
    otherwise="The key is in the file that `TENSORFORGE_SECRETS_KEY_FILE` names.",
)
SECRETS_KEY_FILE = Variable(
    name="TENSORFORGE_SECRETS_KEY_FILE",
    kind=PATH,
    reader=Reader.USER,
    meaning="A file with the key that encrypts the registry's webhook secrets.",
    otherwise="An SQLite registry creates a key file beside its database; PostgreSQL needs a key.",
)
COORDINATOR_SETTINGS = Variable(
    name="TENSORFORGE_COORDINATOR_SETTINGS",
    kind=JSON,
    reader=Reader.CHILD,
    meaning="What the launcher tells the coordinator's process.",
)
LAUNCHER_PID = Variable(
    name="TENSORFORGE_LAUNCHER_PID",
    kind=NUMBER,
    reader=Reader.CHILD,
    meaning="The launcher's process number; the child ends when that process ends.",
    otherwise="The process ends on its own.",
)
REPORT_FD = Variable(
    name="TENSORFORGE_REPORT_FD",
    kind=NUMBER,
    reader=Reader.CHILD,
    meaning="File descriptor of the pipe on which the child reports to the launcher.",
    otherwise="Nothing is reported.",
)
ACTIVATION_FD = Variable(
    name="TENSORFORGE_ACTIVATION_FD",
    kind=NUMBER,
    reader=Reader.CHILD,
    meaning="File descriptor of the pipe from which a spare process reads one line when it becomes a worker.",
    otherwise="The process is a worker at once.",
)
PRELOAD = Variable(
    name="TENSORFORGE_PRELOAD",
    kind=NAMES,
    reader=Reader.CHILD,
    meaning="Modules that a spare process imports before it waits.",
    otherwise="Nothing is imported.",
)
SOAK = Variable(
    name="TENSORFORGE_SOAK",
    kind=FLAG,
    reader=Reader.TESTS,
    meaning="Property tests try many more examples (`make soak`).",
    default=False,
)
STORMS = Variable(
    name="TENSORFORGE_STORMS",
    kind=NUMBER,
    reader=Reader.TESTS,
    meaning="How many random storms `make soak` lets loose on training.",
    default=200,
)
RESCALES = Variable(
    name="TENSORFORGE_RESCALES",
    kind=NUMBER,
    reader=Reader.TESTS,
    meaning="How many rescales `make soak` does in a row when it looks for leaks.",
    default=200,
)

VARIABLES: tuple[Variable[Any], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Variable)
)
"""All of them, in the order above."""
