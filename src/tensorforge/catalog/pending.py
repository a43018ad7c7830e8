"""A recorded save in the background."""

from __future__ import annotations

from collections.abc import Callable

from tensorforge.catalog.chains.records import CheckpointRecord
from tensorforge.checkpoint.parallel import BackgroundWork


class PendingSave(BackgroundWork[CheckpointRecord]):
    """A save in the background. `record` is in state `CREATING`; the result is the completed record."""

    def __init__(self, record: CheckpointRecord, finish: Callable[[], CheckpointRecord]) -> None:
        self.record = record
        super().__init__(f"saving {record.checkpoint_id}", finish)
