"""Why a child process ended: its exit code in words, and the exception that its script raised."""

from __future__ import annotations

import signal
from dataclasses import dataclass

_SIGNAL_HINTS = {
    signal.SIGKILL: "by someone, or by the kernel because memory ran out",
    signal.SIGSEGV: "it crashed in native code",
    signal.SIGBUS: "it crashed in native code, or shared memory ran out",
    signal.SIGABRT: "native code gave up",
    signal.SIGILL: "native code was built for another processor",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFailure:
    """An exception that the user's script raised, as the worker's bootstrap reported it."""

    kind: str
    message: str
    where: str
    traceback: str

    @property
    def summary(self) -> str:
        """One line: what the script raised, and where."""
        if self.is_system_exit:
            text = f"called sys.exit({self.message})"
        else:
            text = f"raised {self.kind}: {self.message}" if self.message else f"raised {self.kind}"
        first, *more = text.splitlines() or [""]
        return f"{first}{' …' if more else ''} ({self.where})" if self.where else first

    @property
    def is_system_exit(self) -> bool:
        """Whether the script called `sys.exit`; its traceback is not worth showing."""
        return self.kind == "SystemExit"

    @property
    def is_run_ended(self) -> bool:
        """Whether the exception only reports that the coordinator has ended the run."""
        return self.kind == "TrainingAbortedError"

    @property
    def traceback_shown(self) -> str:
        """The traceback, or an empty text if it would tell nothing new."""
        return "" if self.is_system_exit or self.is_run_ended else self.traceback.rstrip()

    @property
    def signature(self) -> tuple[str, str]:
        """Equal for two failures with the same exception type at the same place."""
        return self.kind, self.where


def signal_of(code: int) -> signal.Signals | None:
    """The signal that killed the process, or `None` if the process exited by itself."""
    number = -code if code < 0 else code - 128 if code > 128 else 0
    try:
        return signal.Signals(number)
    except ValueError:
        return None


def describe_exit(code: int) -> str:
    """The exit code as the predicate of a sentence about the process."""
    ended_by = signal_of(code)
    if ended_by is None:
        return f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"
    hint = _SIGNAL_HINTS.get(ended_by)
    return f"was killed by {ended_by.name}" + (f" ({hint})" if hint else "")
