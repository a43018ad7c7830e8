"""Reading the stack that a worker dumped: does the training code compute, or wait for other workers?"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

_HEADING = "(most recent call first):"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')
_BOOTSTRAP = "tensorforge/launch/processes/bootstrap.py"
_TRAINING = "tensorforge/train/"
_LIBRARIES = ("tensorforge/", "site-packages/", "/lib/python", "<frozen")
_WAITING = frozenset({"commit", "form", "_form", "_finish", "_evaluate_if_due"})


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on a stack."""

    file: str
    line: int
    function: str


def parse_stack(text: str) -> list[Frame]:
    """The calls of the last stack in a `faulthandler` dump, the most recent first; other lines are ignored."""
    frames: list[Frame] = []
    for line in text.splitlines():
        if line.endswith(_HEADING):
            frames.clear()
        elif frame := _FRAME.match(line):
            frames.append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    return frames


def is_waiting_for_peers(text: str) -> bool:
    """Whether the training code has done its part of the step and waits for the other workers.

    Such a worker does not hang. `False` if no stack of the script is found.
    """
    frames = parse_stack(text)
    return _runs_the_script(frames) and _waits(frames)


def script_stack(text: str) -> str:
    """The part of a dump that people want to see: the script's calls, without those of the bootstrap.

    The whole dump if it has no call of the bootstrap.
    """
    frames = parse_stack(text)
    if not _runs_the_script(frames):
        return text
    own = itertools.takewhile(lambda frame: not frame.file.endswith(_BOOTSTRAP), frames)
    lines = [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in own]
    return "\n".join([f"the script's stack {_HEADING}", *lines])


def _runs_the_script(frames: Iterable[Frame]) -> bool:
    return any(frame.file.endswith(_BOOTSTRAP) for frame in frames)


def _waits(frames: Iterable[Frame]) -> bool:
    """Whether a waiting function of the training code comes before any code of the user."""
    for frame in frames:
        if _TRAINING in frame.file:
            if frame.function in _WAITING:
                return True
        elif not any(part in frame.file for part in _LIBRARIES):
            return False
    return False
