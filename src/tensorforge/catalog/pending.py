"""A recorded save that goes on in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tensorforge.catalog.chains.records import CheckpointRecord


class PendingSave:
    """A save that goes on in the background, and the record that it will complete."""

    def __init__(self, record: CheckpointRecord, finish: Callable[[], CheckpointRecord]) -> None:
        self.record = record
        self._finish = finish
        self._done: CheckpointRecord | None = None
        self._error: BaseException | None = None
        self._is_seen = False
        name = f"record {record.checkpoint_id}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._done = self._finish()
        except BaseException as error:  # noqa: BLE001  raised by whoever asks
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether it has succeeded or failed."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> CheckpointRecord:
        """Wait for the completed record, or raise what went wrong; `TimeoutError` if it goes on."""
        self._thread.join(timeout)
        if self._error is not None:
            self._is_seen = True
            raise self._error
        if self._done is None:
            raise TimeoutError(f"{self.record.checkpoint_id} is still being saved")
        return self._done

    def settle(self) -> None:
        """Wait for the end; raise its error unless somebody has seen it."""
        self._thread.join()
        if not self._is_seen:
            self.result()
