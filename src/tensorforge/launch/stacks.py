"""Reading the stacks that a worker dumped: is its training code at work, or waiting for others?"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')
_BOOTSTRAP = "tensorforge/launch/bootstrap.py"
_TRAINING = "tensorforge/train/"
_LIBRARIES = ("tensorforge/", "site-packages/", "/lib/python", "<frozen")
_WAITING = frozenset({"commit", "form", "_form", "_finish", "_evaluate_if_due"})


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """The calls of one thread, the most recent first."""

    thread: str
    frames: tuple[Frame, ...]

    @property
    def runs_the_script(self) -> bool:
        """Whether the bootstrap started the user's script on this thread."""
        return any(frame.file.endswith(_BOOTSTRAP) for frame in self.frames)


def parse_stacks(text: str) -> tuple[ThreadStack, ...]:
    """The threads of a `faulthandler` dump; lines that are no part of one are passed over."""
    stacks: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            stacks.append((thread[1], []))
        elif stacks and (frame := _FRAME.match(line)):
            stacks[-1][1].append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    return tuple(ThreadStack(thread, tuple(frames)) for thread, frames in stacks)


def is_waiting_for_peers(text: str) -> bool:
    """Whether the training code has done its part of the step and waits for the other workers.

    Then it is not this worker that hangs. Without a recognisable stack the answer is no.
    """
    return any(_waits(stack) for stack in parse_stacks(text) if stack.runs_the_script)


def script_stack(text: str) -> str:
    """What people want to see of a dump: the thread that runs the script, without what started it.

    If that cannot be told apart, the whole dump.
    """
    for stack in parse_stacks(text):
        if stack.runs_the_script:
            own = itertools.takewhile(lambda f: not f.file.endswith(_BOOTSTRAP), stack.frames)
            lines = [
                f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in own
            ]
            return "\n".join(["the script's stack (most recent call first):", *lines])
    return text


def _waits(stack: ThreadStack) -> bool:
    """The most recent code that is no library's tells: ours, in a place that waits, or the user's."""
    for frame in stack.frames:
        if _TRAINING in frame.file:
            if frame.function in _WAITING:
                return True
        elif not any(part in frame.file for part in _LIBRARIES):
            return False
    return False
