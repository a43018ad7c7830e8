"""The run's folder: its lock, and the record of the processes that run there (`chaos` and others read it)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from tensorforge.encoding import decode, encode
from tensorforge.errors import ConflictError, EncodingError, NotFoundError, UnavailableError
from tensorforge.processes import ProcessIdentity

RUN_FILE = "run.json"
LOCK_FILE = "lock"
TOKEN_FILE = "token"  # noqa: S105  the name of a file, written only for its owner


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The processes of a launched run at this moment."""

    ENCODING_VERSION: ClassVar[int] = 2

    script: str
    coordinator_address: str | None = None
    coordinator: ProcessIdentity | None = None
    launcher: ProcessIdentity
    workers: Mapping[str, ProcessIdentity] = field(default_factory=dict)


def write_record(folder: Path, record: RunRecord) -> None:
    """Replace the record atomically: a reader sees the old one or the new one."""
    temporary = folder / f".{RUN_FILE}.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(encode(record), indent=2))
        temporary.replace(folder / RUN_FILE)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_record(folder: Path) -> RunRecord:
    """Read the record of the run in this folder; `NotFoundError` if there is none."""
    try:
        text = (folder / RUN_FILE).read_text()
    except OSError as error:
        raise NotFoundError(
            f"no run was launched in {folder}: it has no {RUN_FILE}; name the folder that "
            "`tensorforge run` printed (--run-dir)"
        ) from error
    try:
        return decode(_upgraded(json.loads(text)), RunRecord)
    except ValueError as error:
        if isinstance(error, EncodingError):
            raise
        raise EncodingError(f"{folder / RUN_FILE} is not JSON: {error}") from error


def _upgraded(payload: Any) -> Any:
    """A record of version 1 in today's form: its processes were a number and the clock time of the start."""
    if not isinstance(payload, dict) or payload.get("version") != 1:
        return payload
    try:
        data = dict(payload["data"])
        data["launcher"] = _process(data["launcher"])
        data["coordinator"] = data["coordinator"] and _process(data["coordinator"])
        data["workers"] = {name: _process(old) for name, old in data["workers"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise EncodingError(f"{RUN_FILE} is of version 1, but not complete: {error!r}") from error
    return {**payload, "version": 2, "data": data}


def _process(old: Mapping[str, Any]) -> dict[str, Any]:
    return asdict(ProcessIdentity.from_clock_time(old["pid"], old["started"]))


def running(folder: Path) -> list[Path]:
    """The folders below this one in which a launcher runs."""
    found = []
    for path in sorted(folder.glob(f"*/{RUN_FILE}")):
        with contextlib.suppress(NotFoundError, EncodingError):
            if read_record(path.parent).launcher.is_running():
                found.append(path.parent)
    return found


def make_folder(folder: Path) -> None:
    """Make the folder and its parents if they do not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ConflictError(f"{folder} is a file; the run needs a folder (--run-dir)") from error
    except OSError as error:
        raise UnavailableError(f"the folder {folder} cannot be made: {error.strerror}") from error


class RunLock:
    """Excludes a second launcher from the folder; the kernel releases the lock when the process ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        make_folder(self._folder)
        path = self._folder / LOCK_FILE
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnavailableError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConflictError(
                f"another launcher runs in {self._folder}; choose another --run-dir, or stop it"
            ) from None
        self._descriptor = descriptor
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
