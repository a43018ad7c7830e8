"""What a worker has to say, kept until it need not be said again.

A coordinator that comes back knows only what is in its journal. So a worker keeps the newest message of each
kind that matters and repeats it when it is welcomed again; hearing it twice changes nothing there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tensorforge.elastic.protocol.messages import (
    Abort,
    Finish,
    Formed,
    FromWorker,
    Heartbeat,
    Leave,
    Progress,
    Ready,
    Suspect,
)

Lasting: TypeAlias = Ready | Formed | Suspect | Leave | Finish | Abort

ABOUT_A_GENERATION = (Ready, Formed, Suspect)
"""These mean something only until the next generation is announced."""
ABOUT_THE_WORKER = (Leave, Finish, Abort)
"""These hold whatever comes."""


class ResendBuffer:
    """The messages of one worker. `send` hands one to the stream of the moment, if there is one.

    Whoever calls holds the worker's lock.
    """

    def __init__(self, send: Callable[[FromWorker], object]) -> None:
        self._send = send
        self._lasting: dict[type, Lasting] = {}
        self._progress: Progress | None = None
        self._sent_progress: Progress | None = None
        self._reported_generation: int | None = None
        self.sequence = 0
        self.answered_sequence = 0

    def say(self, message: Lasting) -> None:
        """Send it, and keep it."""
        self._lasting[type(message)] = message
        self._send(message)

    def repeat(self, *kinds: type) -> None:
        """Send again what was said of these kinds."""
        for kind in kinds:
            if kind in self._lasting:
                self._send(self._lasting[kind])

    def forget(self, *kinds: type) -> None:
        """Say these no more."""
        for kind in kinds:
            self._lasting.pop(kind, None)

    def has_said_goodbye(self) -> bool:
        """Whether this worker is done, one way or the other."""
        return Finish in self._lasting or Abort in self._lasting

    def report(self, progress: Progress) -> bool:
        """Leave progress for the next heartbeat; whether it is the first of its generation."""
        is_first = self._reported_generation != progress.generation
        self._reported_generation = progress.generation
        self._progress = progress
        return is_first

    def report_again(self) -> None:
        """Let the newest progress go out once more with the next heartbeat."""
        self._progress = self._progress or self._sent_progress

    def flush_progress(self) -> None:
        """Send the newest progress now: what follows refers to it."""
        if self._progress is not None:
            self._sent_progress, self._progress = self._progress, None
            self._send(self._sent_progress)

    def beat(self, incarnation: str, generation: int) -> list[FromWorker]:
        """The next heartbeat, and the progress since the last one."""
        self.sequence += 1
        beat = Heartbeat(incarnation=incarnation, generation=generation, sequence=self.sequence)
        if self._progress is None:
            return [beat]
        self._sent_progress, self._progress = self._progress, None
        return [self._sent_progress, beat]

    def start_over(self) -> None:
        """Forget everything that another incarnation said."""
        self._lasting.clear()
        self._progress = self._sent_progress = self._reported_generation = None
