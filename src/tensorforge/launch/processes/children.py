"""Child processes: their output becomes lines, their exits become events, and none outlives the launcher.

Each child leads a session of its own, so that an interrupt typed at the terminal reaches only the launcher.
Three mechanisms end the children: the kernel kills a child when the launcher dies (the bootstrap asks for
it), the reaper process kills the process groups that are left, and the launcher kills the group of each
child that has exited.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeAlias

from tensorforge.encoding import Json
from tensorforge.environment import ACTIVATION_FD, LAUNCHER_PID, REPORT_FD, for_child
from tensorforge.errors import NotFoundError, UnavailableError
from tensorforge.launch.processes import reaper
from tensorforge.launch.processes.output_lines import LineSplitter

_READ_SIZE = 1 << 16
_READS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Printed:
    """A line that a child wrote to its standard output or error."""

    child: str
    line: str


@dataclass(frozen=True, slots=True)
class Reported:
    """A message from the child's bootstrap."""

    child: str
    message: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class StackLine:
    """A line of a stack that a child dumped."""

    child: str
    line: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A child's process exited; the events for everything that it wrote came before."""

    child: str
    code: int


ChildEvent: TypeAlias = Printed | Reported | StackLine | Exited


@dataclass(slots=True)
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    output: int
    report: int
    exit: int
    activation: int | None = None
    splitters: dict[int, LineSplitter] = field(default_factory=dict)


class Children:
    """The child processes of one launcher. Only `wake` may be called from other threads.

    The kernel kills a child when the *thread* that started it ends, so that thread must live as long as the
    children.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._children: dict[str, _Child] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        reaper_read, self._reaper_input = os.pipe2(os.O_CLOEXEC)
        self._reaper = subprocess.Popen(  # noqa: S603  our own file, by our own interpreter
            [sys.executable, "-I", "-S", str(Path(reaper.__file__))],
            stdin=reaper_read,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        os.close(reaper_read)
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the running children."""
        return tuple(self._children)

    @property
    def wake_fd(self) -> int:
        """A descriptor for `signal.set_wakeup_fd`: a byte written to it makes `poll` return."""
        return self._wake_write

    def wake(self) -> None:
        """Make `poll` return early; may be called from any thread."""
        with contextlib.suppress(BlockingIOError):  # full: `poll` returns anyway
            os.write(self._wake_write, b"\0")

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        *,
        spare: bool = False,
    ) -> int:
        """Start a process and return its pid. A spare waits until `activate` is called."""
        output_read, output_write = os.pipe2(os.O_CLOEXEC)
        report_read, report_write = os.pipe2(os.O_CLOEXEC)
        activation_read, activation_write = os.pipe2(os.O_CLOEXEC) if spare else (None, None)
        passed = [report_write, *([] if activation_read is None else [activation_read])]
        added = for_child(
            {REPORT_FD: report_write, LAUNCHER_PID: os.getpid(), ACTIVATION_FD: activation_read}
        )
        try:
            process = subprocess.Popen(  # noqa: S603  starting the user's command is the purpose
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                env={**environment, **added},
                cwd=folder,
                pass_fds=passed,
                start_new_session=True,
            )
        except OSError as error:
            for descriptor in (output_read, report_read, activation_write):
                if descriptor is not None:
                    os.close(descriptor)
            raise UnavailableError(f"{name} could not be started: {error}") from error
        finally:
            os.close(output_write)
            for descriptor in passed:
                os.close(descriptor)
        self._tell_reaper("+", process.pid)
        pidfd = os.pidfd_open(process.pid)
        child = _Child(name, process, output_read, report_read, pidfd, activation_write)
        self._children[name] = child
        for descriptor in (output_read, report_read):
            os.set_blocking(descriptor, False)
            child.splitters[descriptor] = LineSplitter()
            self._selector.register(descriptor, selectors.EVENT_READ, child)
        self._selector.register(child.exit, selectors.EVENT_READ, child)
        return process.pid

    def activate(self, name: str, variables: Mapping[str, str] | None = None) -> int:
        """Activate a waiting spare process as this worker, with these variables added; return its pid."""
        child = self._find(name)
        if child.activation is not None:
            with contextlib.suppress(BrokenPipeError):  # it has just exited; that event follows
                os.write(child.activation, f"{json.dumps(dict(variables or {}))}\n".encode())
            os.close(child.activation)
            child.activation = None
        return child.process.pid

    def pid(self, name: str) -> int:
        """The child's pid."""
        return self._find(name).process.pid

    def signal(self, name: str, number: int) -> None:
        """Send a signal to the child's process; do nothing if it has exited."""
        self._find(name).process.send_signal(number)

    def kill(self, name: str) -> None:
        """Kill the child and everything in its process group."""
        self._kill_group(self._find(name))

    def poll(self, timeout: float | None) -> list[ChildEvent]:
        """Wait at most `timeout` seconds for events and return them in order."""
        events: list[ChildEvent] = []
        ended: list[_Child] = []
        for key, _ in self._selector.select(timeout):
            child: _Child | None = key.data
            if child is None:
                self._drain_wake()
            elif key.fd == child.exit:
                ended.append(child)
            else:
                events += self._read(child, key.fd)
        for child in ended:
            events += self._finish(child)
        return events

    def close(self) -> None:
        """Kill the children that still run, then end the reaper. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for child in list(self._children.values()):
            self._finish(child)
        self._selector.close()
        for descriptor in (self._reaper_input, self._wake_read, self._wake_write):
            os.close(descriptor)
        self._reaper.wait()

    def _find(self, name: str) -> _Child:
        try:
            return self._children[name]
        except KeyError:
            raise NotFoundError(f"{name} is not a running child process") from None

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass

    def _read(self, child: _Child, descriptor: int) -> list[ChildEvent]:
        """Read what is available, up to a limit: a child that never pauses must not starve the others."""
        events: list[ChildEvent] = []
        splitter = child.splitters[descriptor]
        for _ in range(_READS_AT_ONCE):
            try:
                data = os.read(descriptor, _READ_SIZE)
            except BlockingIOError:
                break
            if not data:
                self._selector.unregister(descriptor)
                events += self._lines(child, descriptor, splitter.flush())
                break
            events += self._lines(child, descriptor, splitter.feed(data))
        return events

    def _lines(self, child: _Child, descriptor: int, lines: list[str]) -> list[ChildEvent]:
        if descriptor == child.output:
            return [Printed(child.name, line) for line in lines]
        return [_parse_report(child.name, line) for line in lines]

    def _finish(self, child: _Child) -> list[ChildEvent]:
        # Kill before `wait`: until then no other process group can have this number.
        self._kill_group(child)
        code = child.process.wait()
        self._tell_reaper("-", child.process.pid)
        events: list[ChildEvent] = []
        registered = self._selector.get_map()
        for descriptor in (child.report, child.output):
            while descriptor in registered:
                before = len(events)
                events += self._read(child, descriptor)
                if descriptor in registered and len(events) == before:
                    # A process outside the group keeps the pipe open.
                    events += self._lines(child, descriptor, child.splitters[descriptor].flush())
                    self._selector.unregister(descriptor)
            os.close(descriptor)
        self._selector.unregister(child.exit)
        os.close(child.exit)
        if child.activation is not None:
            os.close(child.activation)
        del self._children[child.name]
        return [*events, Exited(child.name, code)]

    def _kill_group(self, child: _Child) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)

    def _tell_reaper(self, sign: str, group: int) -> None:
        with contextlib.suppress(
            BrokenPipeError
        ):  # the reaper is gone; the kernel still kills the child
            os.write(self._reaper_input, f"{sign}{group}\n".encode())


def _parse_report(child: str, line: str) -> ChildEvent:
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            if isinstance(message, dict):
                return Reported(child, message)
    return StackLine(child, line)
