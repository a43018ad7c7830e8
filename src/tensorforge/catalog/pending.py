"""A recorded save in the background."""

from __future__ import annotations

from collections.abc import Callable

from tensorforge.catalog.chains.records import CheckpointRecord
from tensorforge.checkpoint.parallel import BackgroundResult


class PendingSave:
    """A save in the background, and the record that it will complete."""

    def __init__(self, record: CheckpointRecord, finish: Callable[[], CheckpointRecord]) -> None:
        self.record = record
        self._result = BackgroundResult(f"saving {record.checkpoint_id}", finish)

    @property
    def is_done(self) -> bool:
        """Whether the save has succeeded or failed."""
        return self._result.is_done

    def result(self, timeout: float | None = None) -> CheckpointRecord:
        """Wait for the completed record, or raise the save's error; `TimeoutError` after `timeout` seconds."""
        return self._result.get(timeout)

    def settle(self) -> None:
        """Wait for the save; raise its error unless `result` has raised it already."""
        self._result.settle()
