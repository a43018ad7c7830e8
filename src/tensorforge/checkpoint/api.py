"""`DistributedCheckpoint`: saves and loads the state of a training run, from one process or many."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Self, TypeVar

from tensorforge.checkpoint import optimizers, store_index
from tensorforge.checkpoint.faults import FaultToleranceHandler, as_checkpoint_error
from tensorforge.checkpoint.load.loading import Loader
from tensorforge.checkpoint.model_state import CapturedState, random_state
from tensorforge.checkpoint.options import (
    CheckpointInfo,
    CheckpointLoadResult,
    CheckpointOptions,
    LoadOptions,
    Progress,
    SaveOptions,
    Stateful,
    StorageOptions,
    create_storage,
)
from tensorforge.checkpoint.parallel import BackgroundWork, Deadline
from tensorforge.checkpoint.ranks.coordinators import DistributedCoordinator
from tensorforge.checkpoint.save.saving import Committed, SaveInProgress, Saver
from tensorforge.checkpoint.save.staging import StagingArea
from tensorforge.checkpoint.validator import CheckpointValidator
from tensorforge.errors import CheckpointErrorType
from tensorforge.storage.blobs import BlobStore

Result = TypeVar("Result")


class StaleSaveWarning(UserWarning):
    """Two consecutive saves are equal: probably the caller saves an object that is not the one in training."""


class SaveHandle(BackgroundWork[str]):
    """A save in the background; its result is `prefix`. The state was copied, so the caller may change it."""

    def __init__(self, prefix: str, work: Callable[[], str]) -> None:
        self.prefix = prefix
        super().__init__(f"saving {prefix}", work)


class DistributedCheckpoint:
    """Checkpoints of one group of ranks in one store. All ranks call the same methods in the same order.

    `timeout` (seconds) applies to each call whose options have none. The error of a save in the background is
    raised by its handle, or else by the next call. Use as a context manager, or call `close` at the end.
    """

    def __init__(
        self,
        coordinator: DistributedCoordinator,
        storage: BlobStore | None = None,
        fault_handler: FaultToleranceHandler | None = None,
        validator: CheckpointValidator | None = None,
        *,
        timeout: float = CheckpointOptions().default_timeout,
    ) -> None:
        self.storage = storage if storage is not None else create_storage(StorageOptions())
        self._coordinator = coordinator
        faults = fault_handler or FaultToleranceHandler(self.storage)
        self._validator = validator or CheckpointValidator(self.storage)
        self._saver = Saver(coordinator, self.storage, faults)
        self._loader = Loader(coordinator, self.storage, faults, self._validator)
        self._timeout = timeout
        self._staging = StagingArea()
        self._pending: SaveHandle | None = None
        self._last_content = ""

    @classmethod
    def create(
        cls, coordinator: DistributedCoordinator, options: CheckpointOptions | None = None
    ) -> Self:
        """Make a `DistributedCheckpoint` from options: storage, retries, checkers, default timeout."""
        chosen = options or CheckpointOptions()
        storage = create_storage(chosen.storage)
        return cls(
            coordinator,
            storage,
            FaultToleranceHandler(storage, chosen.retry_policy),
            CheckpointValidator(storage, chosen.integrity_checkers, chosen.compatibility_checkers),
            timeout=chosen.default_timeout,
        )

    def save(
        self,
        model: Stateful,
        optimizer: Stateful | None = None,
        options: SaveOptions | None = None,
        *,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> str:
        """Save durably and return the checkpoint's prefix.

        When this returns, the checkpoint exists and survives a power cut. When this raises
        `CheckpointError`, there is no checkpoint for any rank, and the files of this attempt are removed.
        """
        chosen = options or SaveOptions()
        self._settle()
        deadline = Deadline(chosen.timeout or self._timeout, cancel)
        with _failing_as(CheckpointErrorType.SAVE_FAILED, chosen.checkpoint_prefix, "saving"):
            save = self._saver.plan(self._capturing(model, optimizer, chosen), chosen, deadline)
            committed = self._saver.write(save, deadline, progress)
        self._note_content(committed)
        return committed.prefix

    def async_save(
        self,
        model: Stateful,
        optimizer: Stateful | None = None,
        options: SaveOptions | None = None,
        *,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> SaveHandle:
        """Copy the state, start saving the copy in the background, and return.

        When this returns, the caller may change the state. The memory of the copy is reused by the next call.
        """
        chosen = options or SaveOptions()
        self._settle()
        deadline = Deadline(chosen.timeout or self._timeout, cancel)
        with _failing_as(CheckpointErrorType.SAVE_FAILED, chosen.checkpoint_prefix, "saving"):
            save = self._saver.plan(self._capturing(model, optimizer, chosen), chosen, deadline)
            self._saver.stage(save, self._staging, deadline)
            if save.failure is not None:
                self._saver.write(save, deadline, progress)
        self._pending = SaveHandle(
            save.claim.prefix, lambda: self._finish(save, deadline, progress)
        )
        return self._pending

    def _finish(self, save: SaveInProgress, deadline: Deadline, progress: Progress | None) -> str:
        prefix = save.claim.prefix
        with _failing_as(CheckpointErrorType.SAVE_FAILED, prefix, "saving in the background"):
            committed = self._saver.write(save, deadline, progress)
        self._note_content(committed)
        return committed.prefix

    def save_model_only(self, model: Stateful, options: SaveOptions | None = None) -> str:
        """Save a model without an optimizer."""
        return self.save(model, None, options)

    def load(
        self,
        model: Stateful,
        optimizer: Stateful | None = None,
        options: LoadOptions | None = None,
        *,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> CheckpointLoadResult:
        """Load into an existing model and optimizer; the number of ranks may differ from that of the save.

        Every byte is verified. Without a prefix this loads the newest intact checkpoint, with a warning if a
        newer one is damaged. If this raises, the values of the model are undefined.
        """
        chosen = options or LoadOptions()
        self._settle()
        deadline = Deadline(chosen.timeout or self._timeout, cancel)
        with _failing_as(CheckpointErrorType.LOAD_FAILED, chosen.checkpoint_prefix, "loading"):
            return self._loader.load(model, optimizer, chosen, deadline, progress)

    def list_checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints in the store, oldest first."""
        return store_index.list_checkpoints(self.storage)

    def delete_checkpoint(self, checkpoint_prefix: str) -> None:
        """Delete a checkpoint. Any number of ranks may call this; rank 0 deletes."""
        self._settle()
        if self._coordinator.rank == 0:
            store_index.delete_checkpoint(self.storage, checkpoint_prefix)

    def wait(self) -> None:
        """Wait for the save in the background; raise its error unless its handle has raised it already."""
        self._settle()

    def close(self) -> None:
        """Wait for the save in the background, then close the storage and free the memory of copies."""
        try:
            self._settle()
        finally:
            self._staging.close()
            self.storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.settle()

    def _capturing(
        self, model: Stateful, optimizer: Stateful | None, options: SaveOptions
    ) -> Callable[[], CapturedState]:
        def capture() -> CapturedState:
            captured = CapturedState()
            model_state = model.state_dict()
            captured.add("model", model_state)
            if optimizer is not None and options.include_optimizer:
                captured.add("optimizer", _optimizer_state(optimizer, model, model_state))
            if options.extra_state:
                captured.add("extra", options.extra_state)
            if options.include_rng_state:
                captured.add("rng", {str(self._coordinator.rank): random_state()})
            return captured

        return capture

    def _note_content(self, committed: Committed) -> None:
        stale = committed.content == self._last_content
        self._last_content = committed.content
        if stale and self._coordinator.rank == 0:
            warnings.warn(
                f"{committed.prefix} equals the checkpoint saved before it; "
                "check that the model in training is the one that is saved",
                StaleSaveWarning,
                stacklevel=3,
            )


def _optimizer_state(
    optimizer: Stateful, model: Stateful, model_state: object
) -> dict[str, object]:
    if optimizers.is_keyed(optimizer):
        names = optimizers.parameter_names(model, optimizer)
        return optimizers.keyed_state(optimizer, names, dict(model_state))  # type: ignore[call-overload]  # a mapping
    return dict(optimizer.state_dict())


@contextlib.contextmanager
def _failing_as(kind: CheckpointErrorType, prefix: str | None, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        described = as_checkpoint_error(error, prefix or "", kind, f"{what} failed")
        if described is error:
            raise
        raise described from error
