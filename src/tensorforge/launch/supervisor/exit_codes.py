"""What an exit code of a child process means."""

from __future__ import annotations

import signal
from dataclasses import dataclass

_SIGNAL_HINTS = {
    signal.SIGKILL: "by someone, or by the kernel for want of memory",
    signal.SIGSEGV: "it crashed in native code",
    signal.SIGBUS: "it crashed in native code, or shared memory ran out",
    signal.SIGABRT: "native code gave up",
    signal.SIGILL: "native code was built for another processor",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFailure:
    """An exception that the user's script raised, as its worker told it."""

    kind: str
    message: str
    where: str
    traceback: str

    @property
    def summary(self) -> str:
        """One line: what the worker did, and where."""
        if self.is_exit:
            text = f"called sys.exit({self.message})"
        else:
            text = f"raised {self.kind}: {self.message}" if self.message else f"raised {self.kind}"
        first, *more = text.splitlines() or [""]
        return f"{first}{' …' if more else ''} ({self.where})" if self.where else first

    @property
    def is_exit(self) -> bool:
        """Whether the script ended itself: it has said why, and there is no traceback to show."""
        return self.kind == "SystemExit"

    @property
    def is_echo(self) -> bool:
        """Whether it only repeats that the run has ended, for a reason that is known elsewhere."""
        return self.kind == "TrainingAbortedError"

    @property
    def shown(self) -> str:
        """The traceback, if it is worth showing."""
        return "" if self.is_exit or self.is_echo else self.traceback.rstrip()

    @property
    def signature(self) -> tuple[str, str]:
        """Equal for two failures that are the same bug."""
        return self.kind, self.where


def signal_of(code: int) -> signal.Signals | None:
    """The signal that ended the process, or `None` if it ended by itself."""
    number = -code if code < 0 else code - 128 if code > 128 else 0
    try:
        return signal.Signals(number)
    except ValueError:
        return None


def describe_exit(code: int) -> str:
    """What happened, in words."""
    ended_by = signal_of(code)
    if ended_by is None:
        return f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"
    hint = _SIGNAL_HINTS.get(ended_by)
    return f"was killed by {ended_by.name}" + (f" ({hint})" if hint else "")
