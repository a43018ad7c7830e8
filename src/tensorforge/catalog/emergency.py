"""Emergency saves: on SIGTERM, and when the training code raises an exception.

A signal may arrive during an optimizer step, when the weights and the optimizer's state are of different steps.
So the signal handler only notes the signal, and the save happens when the training code calls `check`.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from tensorforge.errors import ConflictError

_LOG = logging.getLogger(__name__)


class EmergencySaves:
    """A context manager that calls `save` before the process ends by a signal or an exception.

    with EmergencySaves(lambda: runs.emergency(model, optimizer, epoch=epoch, step=step)) as emergency:
        for step in ...:
            train_one_step()
            emergency.check()

    After a signal, `check` saves and ends the process with the signal's exit code (143 for SIGTERM); call it
    between two steps. If an exception leaves the block and `when_raised` returns true for it, the state is
    saved and the exception continues. Use it in the main thread, where Python delivers signals.
    """

    def __init__(
        self,
        save: Callable[[], object],
        *,
        signals: Sequence[signal.Signals] = (signal.SIGTERM,),
        when_raised: Callable[[BaseException], bool] = lambda error: isinstance(error, Exception),
    ) -> None:
        self._save = save
        self._signals = tuple(signals)
        self._when_raised = when_raised
        self._received: int | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def is_requested(self) -> bool:
        """Whether a signal has arrived."""
        return self._received is not None

    def check(self) -> None:
        """If a signal has arrived, save and raise `SystemExit`."""
        if self._received is not None:
            self._save()
            raise SystemExit(128 + self._received)

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise ConflictError("use EmergencySaves in the main thread, where signals arrive")
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._note_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None and self._when_raised(error):
                self._save_after(error)
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        self._received = number

    def _save_after(self, error: BaseException) -> None:
        try:
            self._save()
        except Exception as problem:  # noqa: BLE001  the error of the training is raised, not this one
            _LOG.exception("no emergency checkpoint after %r", error)
            error.add_note(f"no emergency checkpoint was saved: {problem}")
