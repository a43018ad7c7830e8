"""How a worker handles each message of the coordinator, on the stream thread."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.cluster.global_state import GlobalTrainingState
from tensorforge.cluster.rescaling import RescalingEvent
from tensorforge.elastic.protocol import messages
from tensorforge.elastic.worker.resend_buffer import (
    ABOUT_A_GENERATION,
    ABOUT_THE_WORKER,
    ResendBuffer,
)
from tensorforge.elastic.worker.worker_state import WorkerState
from tensorforge.errors import ConflictError, TensorForgeError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The functions that training code has registered; they must not block."""

    rescaling_requested: list[Callable[[RescalingEvent], object]] = field(default_factory=list)
    state_synchronized: list[Callable[[GlobalTrainingState], object]] = field(default_factory=list)
    fenced: list[Callable[[str], object]] = field(default_factory=list)
    run_ended: list[Callable[[str], object]] = field(default_factory=list)


def call_all(listeners: Iterable[Callable[[Any], object]], value: object) -> None:
    """Call every listener, even if one raises."""
    for listener in tuple(listeners):
        try:
            listener(value)
        except Exception:
            log.exception("a callback raised")


class Inbox:
    """Handles messages: changes the state, wakes waiting threads, calls the callbacks.

    `announced` is called with the event of each new generation, and `gathered` with its number once all members
    have answered; `retire` when no other stream is needed, and `rejoin` when a new one is needed now;
    `configure` with the run's configuration.
    """

    def __init__(
        self,
        state: WorkerState,
        resend_buffer: ResendBuffer,
        changed: threading.Condition,
        callbacks: Callbacks,
        *,
        announced: Callable[[RescalingEvent], None],
        gathered: Callable[[int], None],
        retire: Callable[[], None],
        rejoin: Callable[[], None],
        configure: Callable[[ElasticTrainingConfig], None],
    ) -> None:
        self._state = state
        self._resend_buffer = resend_buffer
        self._changed = changed
        self._callbacks = callbacks
        self._announced, self._gathered = announced, gathered
        self._retire, self._rejoin, self._configure = retire, rejoin, configure

    def receive(self, message: messages.FromCoordinator) -> None:
        """Handle one message."""
        if isinstance(message, messages.Pong):
            self._answered(message)
        elif isinstance(message, messages.Welcome):
            self._welcomed(message)
        elif isinstance(message, messages.Rescale):
            self._rescale(message)
        elif isinstance(message, messages.FormationNotice):
            self._gathered_all(message)
        elif isinstance(message, messages.Released):
            self._released(message.reason)
        elif isinstance(message, messages.LeaveRefused):
            self._leave_refused(message.reason)
        elif isinstance(message, messages.Ended):
            self._ended(message)
        elif isinstance(message, messages.Refused):
            self._refused(message)
        else:
            log.info("%s: %s", self._state.worker_id.id, message.reason)

    def lost(self, problem: TensorForgeError | None) -> None:
        """The stream broke; with `problem`, no other one will be opened."""
        with self._changed:
            if problem is not None:
                self._state.problem = problem
            self._changed.notify_all()

    def _answered(self, message: messages.Pong) -> None:
        with self._changed:
            self._resend_buffer.answered_sequence = max(
                self._resend_buffer.answered_sequence, message.sequence
            )
            self._changed.notify_all()

    def _welcomed(self, message: messages.Welcome) -> None:
        with self._changed:
            self._configure(message.config)
            self._state.was_welcomed = self._state.is_welcomed = True
            if message.workers is not None:
                # The worker is still a member of the generation that it trains in.
                self._resend_buffer.resend(*ABOUT_A_GENERATION)
            self._resend_buffer.resend(*ABOUT_THE_WORKER)
            self._resend_buffer.report_again()
            self._changed.notify_all()

    def _rescale(self, message: messages.Rescale) -> None:
        with self._changed:
            event = self._state.announce(message)
            if event is None:
                return
            self._resend_buffer.forget(*ABOUT_A_GENERATION)
        self._announced(event)

    def _gathered_all(self, message: messages.FormationNotice) -> None:
        with self._changed:
            if not self._state.gather(message):
                return
            self._changed.notify_all()
        self._gathered(message.generation)

    def _released(self, reason: str) -> None:
        with self._changed:
            self._state.is_leaving = True
            self._state.released = reason
            self._changed.notify_all()
        self._retire()

    def _leave_refused(self, reason: str) -> None:
        with self._changed:
            self._state.leave_refused = reason
            self._changed.notify_all()

    def _ended(self, message: messages.Ended) -> None:
        with self._changed:
            self._state.ended = message
            self._changed.notify_all()
        call_all(self._callbacks.run_ended, message.reason)
        self._retire()

    def _refused(self, message: messages.Refused) -> None:
        with self._changed:
            is_done = self._resend_buffer.is_done()
        # A worker that is done has reported why; this reason would only hide that one.
        level = logging.INFO if is_done else logging.WARNING
        worker_id = self._state.worker_id.id
        log.log(level, "%s was refused (%s): %s", worker_id, message.code, message.reason)
        if message.code == messages.REFUSED_FENCED:
            self._fenced(message.reason)
        elif message.code != messages.REFUSED_DUPLICATE or not self._state.was_welcomed:
            # Only a worker that had the name before may wait until the name is free.
            self.lost(ConflictError(message.reason))
            self._retire()

    def _fenced(self, reason: str) -> None:
        with self._changed:
            is_done = self._state.is_leaving or self._resend_buffer.is_done()
            if not is_done:
                self._state.start_over(uuid.uuid4().hex)
                self._resend_buffer.start_over()
                self._changed.notify_all()
        if is_done:
            self._released(reason)
            return
        call_all(self._callbacks.fenced, reason)
        self._rejoin()
