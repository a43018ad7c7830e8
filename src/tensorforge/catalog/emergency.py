"""Saving before the process ends: on SIGTERM, and when the training code raises.

A signal may come in the middle of an optimizer step, when weights and optimizer do not fit together. So the
handler only remembers it, and the save happens where the training code says that the state is whole.
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
    """Calls `save` once, in an emergency, while this block lasts.

    with EmergencySaves(lambda: runs.emergency(model, optimizer, epoch=epoch, step=step)) as emergency:
        for step in ...:
            train_one_step()
            emergency.check()

    `check` between two steps ends the process with the signal's exit code (143 for SIGTERM) after the save.
    An exception that leaves the block saves too, as long as `when_raised` says that the state is fit for it,
    and goes on. In the main thread only: Python delivers signals there.
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
        """Whether a signal has come."""
        return self._received is not None

    def check(self) -> None:
        """If a signal has come: save, and end the process by `SystemExit`."""
        if self._received is not None:
            self._save()
            raise SystemExit(128 + self._received)

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise ConflictError("emergency saves need the main thread, where signals arrive")
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None and self._when_raised(error):
                self._save_despite(error)
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self._received = number

    def _save_despite(self, error: BaseException) -> None:
        try:
            self._save()
        except Exception as problem:  # noqa: BLE001  the training's own error is what matters
            _LOG.exception("no emergency checkpoint after %r", error)
            error.add_note(f"no emergency checkpoint was saved: {problem}")
