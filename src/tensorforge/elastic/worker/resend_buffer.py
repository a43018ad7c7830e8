"""Outbound messages that are kept and sent again after a reconnection.

A restarted coordinator knows only what is in its journal. So a worker keeps the newest message of each lasting
kind and sends it again when its stream is accepted again. Receiving a message twice changes nothing.
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
"""Kept until the next generation is announced."""
ABOUT_THE_WORKER = (Leave, Finish, Abort)
"""Kept until the process starts over with a new incarnation."""


class ResendBuffer:
    """The outbound messages of one worker. `send` sends one on the present stream, if there is one.

    Callers hold the worker's lock.
    """

    def __init__(self, send: Callable[[FromWorker], object]) -> None:
        self._send = send
        self._lasting: dict[type, Lasting] = {}
        self._progress: Progress | None = None
        self._sent_progress: Progress | None = None
        self._reported_generation: int | None = None
        self.sequence = 0
        self.answered_sequence = 0

    def send(self, message: Lasting) -> None:
        """Send a message, and keep it in place of the last one of its kind."""
        self._lasting[type(message)] = message
        self._send(message)

    def resend(self, *kinds: type) -> None:
        """Send the kept messages of these kinds again."""
        for kind in kinds:
            if kind in self._lasting:
                self._send(self._lasting[kind])

    def forget(self, *kinds: type) -> None:
        """Drop the kept messages of these kinds."""
        for kind in kinds:
            self._lasting.pop(kind, None)

    def is_done(self) -> bool:
        """Whether this worker has told that it finished or aborted."""
        return Finish in self._lasting or Abort in self._lasting

    def report(self, progress: Progress) -> bool:
        """Keep progress for the next heartbeat; returns whether it is the first of its generation."""
        is_first = self._reported_generation != progress.generation
        self._reported_generation = progress.generation
        self._progress = progress
        return is_first

    def report_again(self) -> None:
        """Send the newest progress again with the next heartbeat."""
        self._progress = self._progress or self._sent_progress

    def flush_progress(self) -> None:
        """Send the newest progress now, before a message that depends on it."""
        if self._progress is not None:
            self._sent_progress, self._progress = self._progress, None
            self._send(self._sent_progress)

    def beat(self, incarnation: str, generation: int) -> list[FromWorker]:
        """The progress since the last heartbeat, if any, and the next heartbeat."""
        self.sequence += 1
        beat = Heartbeat(incarnation=incarnation, generation=generation, sequence=self.sequence)
        if self._progress is None:
            return [beat]
        self._sent_progress, self._progress = self._progress, None
        return [self._sent_progress, beat]

    def start_over(self) -> None:
        """Drop everything that the earlier incarnation sent."""
        self._lasting.clear()
        self._progress = self._sent_progress = self._reported_generation = None
