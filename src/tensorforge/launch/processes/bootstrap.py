"""What runs inside a worker: `python -m tensorforge.launch.processes.bootstrap [-m] SCRIPT [ARGUMENTS]`.

The bootstrap has the kernel kill the process when its launcher dies, makes it dump its stack on SIGUSR1,
runs the user's script as `__main__`, and reports to the launcher what the script raised. It imports neither
torch nor numpy, except in a spare, which imports the given modules and waits for activation.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import io
import json
import os
import runpy
import signal
import sys
import sysconfig
import traceback
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from tensorforge.cluster.ended_runs import exit_code_of_runs
from tensorforge.encoding import Json
from tensorforge.environment import ACTIVATION_FD, LAUNCHER_PID, PRELOAD, REPORT_FD

STACKS_SIGNAL = signal.SIGUSR1
STOP_SIGNAL = signal.SIGUSR2
"""Makes the training code stop the run on all workers after the current step, with a checkpoint."""
USAGE_ERROR = 2
_PR_SET_PDEATHSIG = 1


class Reporter:
    """Sends messages to the launcher, one line of JSON each; without a launcher it does nothing."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @classmethod
    def from_environment(cls) -> Reporter:
        """A reporter for the pipe that the launcher opened, if it did."""
        descriptor = REPORT_FD.take()
        if descriptor is None:
            return cls(None)
        try:
            os.set_inheritable(descriptor, False)
            return cls(os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace"))
        except OSError:
            return cls(None)

    @property
    def stream(self) -> TextIO | None:
        """The pipe, to which the stack is dumped as well."""
        return self._stream

    def report(self, kind: str, **facts: Json) -> None:
        """Send a message."""
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(json.dumps({"kind": kind, **facts}) + "\n")
                self._stream.flush()


def die_with_launcher() -> bool:
    """Have the kernel kill this process when its launcher dies; exit if the launcher has died already.

    Return whether there is a launcher.
    """
    launcher = LAUNCHER_PID.take()
    if launcher is None:
        return False
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)
    return True


def leave_when_interrupted() -> None:
    """For a worker at a terminal: the first SIGINT makes it leave after its step, the second ends it."""

    def interrupted(number: int, frame: types.FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # training has not begun
            signal.default_int_handler(number, frame)
        # Not through `sys.stderr`: the signal may have interrupted a write to it.
        with contextlib.suppress(OSError):
            os.write(2, b"leaving after this step; interrupt again to end at once\n")
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGINT, interrupted)


def wait_for_activation(reporter: Reporter) -> None:
    """In a spare: import the modules, then wait for activation; exit if the launcher closes the pipe."""
    descriptor, modules = ACTIVATION_FD.take(), PRELOAD.take()
    if descriptor is None:
        return
    os.set_inheritable(descriptor, False)
    for module in modules or ():
        # An error is raised again, with the script's traceback, when the script imports the module.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            importlib.import_module(module)
    reporter.report("warm")
    with os.fdopen(descriptor, encoding="utf-8") as activation:
        line = activation.readline()
    if not line:
        os._exit(0)
    os.environ.update(json.loads(line))


def main(arguments: Sequence[str]) -> int:
    """Run the script and return the process's exit code: 75 if its run ended before the goal was reached."""
    if not die_with_launcher():
        leave_when_interrupted()
    reporter = Reporter.from_environment()
    faulthandler.enable()
    # Before and after training nothing handles this signal, and it must not kill the process.
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)
    # Only the main thread, which runs the script: dumping the stacks of threads that run can crash the
    # process.
    faulthandler.register(STACKS_SIGNAL, file=reporter.stream or sys.stderr, all_threads=False)
    wait_for_activation(reporter)
    as_module = bool(arguments) and arguments[0] == "-m"
    words = list(arguments[1:] if as_module else arguments)
    if not words:
        return _refuse("no script is given; usage: [-m] SCRIPT [ARGUMENTS]")
    if not as_module and not Path(words[0]).is_file():
        return _refuse(f"the script {words[0]} does not exist")
    return _run(words, as_module, reporter)


def _refuse(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return USAGE_ERROR


def _run(words: list[str], as_module: bool, reporter: Reporter) -> int:
    try:
        sys.argv[:] = words
        if as_module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            _run_script(words[0])
    except SystemExit as error:
        return _read_exit(error, reporter)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException as error:  # noqa: BLE001  every exception is reported, then the process exits
        _report_failure(error, reporter)
        return 1
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
    return exit_code_of_runs()


def _run_script(script: str) -> None:
    """Run the script as `python script.py` does: its folder is first on the path, its module `__main__`."""
    sys.path.insert(0, str(Path(script).resolve().parent))
    module = types.ModuleType("__main__")
    module.__file__ = script
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    with io.open_code(str(Path(script).absolute())) as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102  running the user's script is what this is for


def _read_exit(error: SystemExit, reporter: Reporter) -> int:
    if error.code is None or error.code == 0:
        return exit_code_of_runs()
    if not isinstance(error.code, int):
        sys.stderr.write(f"{error.code}\n")
    reporter.report("failed", **_describe(error, str(error.code)))
    return error.code if isinstance(error.code, int) else 1


def _report_failure(error: BaseException, reporter: Reporter) -> None:
    facts = _describe(error, str(error))
    if reporter.stream is None:  # a launcher shows it, once for all its workers
        sys.stderr.write(facts["traceback"])
        sys.stderr.flush()
    reporter.report("failed", **facts)


def _describe(error: BaseException, message: str) -> dict[str, str]:
    exception = traceback.TracebackException.from_exception(error)
    _drop_bootstrap_frames(exception)
    return {
        "exception": type(error).__qualname__,
        "message": message,
        "where": _where(error, exception.stack),
        "traceback": "".join(exception.format()),
    }


def _drop_bootstrap_frames(exception: traceback.TracebackException) -> None:
    frames = list(exception.stack)
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while frames and frames[0].filename in ours:
        frames.pop(0)
    exception.stack = traceback.StackSummary.from_list(frames)


def _where(error: BaseException, stack: traceback.StackSummary) -> str:
    """The innermost line of the user's own code, outside of libraries and this package."""
    if isinstance(error, SyntaxError) and not stack:
        return f"{Path(error.filename or '?').name}:{error.lineno}"
    paths = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    ours = Path(__file__).resolve().parents[2]
    libraries = ("<frozen", str(ours), *(str(Path(path).resolve()) for path in paths))
    own = [frame for frame in stack if not str(frame.filename).startswith(libraries)]
    if not own and not stack:
        return ""
    frame = own[-1] if own else stack[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
