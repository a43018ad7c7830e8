"""What runs inside a worker: `python -m tensorforge.launch.processes.bootstrap [-m] SCRIPT [ARGUMENTS]`.

It ties the process to its launcher, makes it dump its stack on SIGUSR1, runs the user's script as
`__main__`, and tells the launcher what the script raised. It imports neither torch nor numpy by itself,
unless it is a spare: then it imports what it was told to and waits for its turn.
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

from tensorforge.encoding import Json
from tensorforge.environment import LAUNCHER_PID, PRELOAD, REPORT_FD, TURN_FD

STACKS_SIGNAL = signal.SIGUSR1
STOP_SIGNAL = signal.SIGUSR2
"""What the training code takes for: stop on all workers after this step, with a checkpoint."""
USAGE_ERROR = 2
_PR_SET_PDEATHSIG = 1


class Reporter:
    """The way back to the launcher: a line of JSON per message; nobody listening is fine too."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @classmethod
    def from_environment(cls) -> Reporter:
        """The pipe that the launcher opened, if it did."""
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
        """The pipe, for the stack."""
        return self._stream

    def tell(self, kind: str, **facts: Json) -> None:
        """Send a message."""
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(json.dumps({"kind": kind, **facts}) + "\n")
                self._stream.flush()


def die_with_launcher() -> bool:
    """Have the kernel kill this process when its launcher ends; if that happened already, exit.

    Returns whether there is a launcher.
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
    """For a worker at a terminal: the first interrupt lets it leave after its step, the second ends it."""

    def interrupted(number: int, frame: types.FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # no step to wait for
            signal.default_int_handler(number, frame)
        # Past the stream, which this may have interrupted in the middle of a line.
        with contextlib.suppress(OSError):
            os.write(2, b"leaving after this step; interrupt again to end at once\n")
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGINT, interrupted)


def wait_for_turn(reporter: Reporter) -> None:
    """A spare prepares itself and waits until it is needed; one that is not needed ends here."""
    descriptor, modules = TURN_FD.take(), PRELOAD.take()
    if descriptor is None:
        return
    os.set_inheritable(descriptor, False)
    for module in modules or ():
        # What is wrong with it comes out, with the script's own traceback, when the script imports it.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            importlib.import_module(module)
    reporter.tell("warm")
    turn = os.read(descriptor, 1)
    os.close(descriptor)
    if not turn:
        os._exit(0)


def main(arguments: Sequence[str]) -> int:
    """Run the script and return the process's exit code."""
    if not die_with_launcher():
        leave_when_interrupted()
    reporter = Reporter.from_environment()
    faulthandler.enable()
    # Until the training code listens for it, and after: a stop that comes too early or late is no death.
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)
    # The signal reaches the main thread, which runs the script. Other threads go on meanwhile, and to
    # walk over their stacks as they change could end a healthy worker.
    faulthandler.register(STACKS_SIGNAL, file=reporter.stream or sys.stderr, all_threads=False)
    wait_for_turn(reporter)
    as_module = bool(arguments) and arguments[0] == "-m"
    words = list(arguments[1:] if as_module else arguments)
    if not words:
        return _refuse("which script? usage: [-m] SCRIPT [ARGUMENTS]")
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
    except BaseException as error:  # noqa: BLE001  whatever the script raised is told, then the process ends
        _tell_failure(error, reporter)
        return 1
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
    return 0


def _run_script(script: str) -> None:
    """As `python script.py` does: its folder comes first on the path, it is `__main__` to the end."""
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
        return 0
    if not isinstance(error.code, int):
        sys.stderr.write(f"{error.code}\n")
    reporter.tell("failed", **_describe(error, str(error.code)))
    return error.code if isinstance(error.code, int) else 1


def _tell_failure(error: BaseException, reporter: Reporter) -> None:
    facts = _describe(error, str(error))
    if reporter.stream is None:  # a launcher shows it by itself, and once for all its workers
        sys.stderr.write(facts["traceback"])
        sys.stderr.flush()
    reporter.tell("failed", **facts)


def _describe(error: BaseException, message: str) -> dict[str, str]:
    told = traceback.TracebackException.from_exception(error)
    _forget_our_frames(told)
    return {
        "exception": type(error).__qualname__,
        "message": message,
        "where": _where(error, told.stack),
        "traceback": "".join(told.format()),
    }


def _forget_our_frames(told: traceback.TracebackException) -> None:
    frames = list(told.stack)
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while frames and frames[0].filename in ours:
        frames.pop(0)
    told.stack = traceback.StackSummary.from_list(frames)


def _where(error: BaseException, stack: traceback.StackSummary) -> str:
    """The innermost line of the user's own code: not the libraries', not ours."""
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
