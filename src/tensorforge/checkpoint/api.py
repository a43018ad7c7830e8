"""Saving and loading the state of a training run, from one process or many."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self, TypeVar

from tensorforge.checkpoint import optimizers, store_index
from tensorforge.checkpoint.factory import create_storage
from tensorforge.checkpoint.faults import FaultToleranceHandler, as_checkpoint_error
from tensorforge.checkpoint.load.loading import Loader
from tensorforge.checkpoint.model_state import Captured, random_state
from tensorforge.checkpoint.options import (
    CheckpointInfo,
    CheckpointLoadResult,
    CheckpointOptions,
    LoadOptions,
    Progress,
    SaveOptions,
    Stateful,
    StorageOptions,
)
from tensorforge.checkpoint.parallel import Guard
from tensorforge.checkpoint.ranks.coordinators import DistributedCoordinator
from tensorforge.checkpoint.save.saving import Committed, Saver, Ticket
from tensorforge.checkpoint.save.staging import StagingArea
from tensorforge.checkpoint.validator import CheckpointValidator
from tensorforge.errors import CheckpointErrorType
from tensorforge.storage.blobs import BlobStore

Result = TypeVar("Result")


class StaleSaveWarning(UserWarning):
    """What was saved is equal to the save before: probably the state never reached the checkpoint."""


class SaveHandle:
    """A save that goes on in the background. The state may change; the result is still to come."""

    def __init__(self, prefix: str, work: Callable[[], str]) -> None:
        self.prefix = prefix
        self._error: BaseException | None = None
        self._surfaced = False
        self._finished = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(work,), name=f"save {prefix}", daemon=True
        )
        self._thread.start()

    def _run(self, work: Callable[[], str]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised by whoever asks
            self._error = error
        finally:
            self._finished.set()

    @property
    def is_done(self) -> bool:
        """Whether it has succeeded or failed."""
        return self._finished.is_set()

    def result(self, timeout: float | None = None) -> str:
        """Wait for the end and return the prefix, or raise what went wrong; `TimeoutError` if it goes on."""
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self.prefix} is still being saved after {timeout} seconds")
        self._thread.join()
        if self._error is not None:
            self._surfaced = True
            raise self._error
        return self.prefix

    def settle(self) -> None:
        """Wait for the end; raise its error unless somebody has seen it."""
        self._finished.wait()
        self._thread.join()
        if self._error is not None and not self._surfaced:
            self.result()


class DistributedCheckpoint:
    """Checkpoints of one group of ranks in one store. Every rank has one and calls it in the same order.

    `timeout` (seconds) bounds every call that does not bring its own. A failed save in the background is raised
    by its handle, or else by the next call. Use as a context manager, or `close` at the end.
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
        self._area = StagingArea()
        self._pending: SaveHandle | None = None
        self._last_content = ""

    @classmethod
    def create(
        cls, coordinator: DistributedCoordinator, options: CheckpointOptions | None = None
    ) -> Self:
        """Make one from options: storage, retries, checkers and the default timeout."""
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
        """Save, durably, and return the checkpoint's prefix.

        When this returns, the checkpoint exists and survives a power cut. When it raises
        `CheckpointError`, it does not exist, on any rank, and nothing of it is left behind.
        """
        chosen = options or SaveOptions()
        self._settle()
        guard = self._guard(chosen.timeout, cancel)
        with _failing_as(CheckpointErrorType.SAVE_FAILED, chosen.checkpoint_prefix, "saving"):
            ticket = self._saver.plan(self._capturing(model, optimizer, chosen), chosen, guard)
            committed = self._saver.write(ticket, guard, progress)
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
        """Copy the state and return; the copy is saved in the background.

        When this returns, the state may change. The copy lives in memory that is kept for the next time.
        """
        chosen = options or SaveOptions()
        self._settle()
        guard = self._guard(chosen.timeout, cancel)
        with _failing_as(CheckpointErrorType.SAVE_FAILED, chosen.checkpoint_prefix, "saving"):
            ticket = self._saver.plan(self._capturing(model, optimizer, chosen), chosen, guard)
            self._saver.stage(ticket, self._area, guard)
            if ticket.failure is not None:
                self._saver.write(ticket, guard, progress)
        self._pending = SaveHandle(
            ticket.intent.prefix, lambda: self._finish(ticket, guard, progress)
        )
        return self._pending

    def _finish(self, ticket: Ticket, guard: Guard, progress: Progress | None) -> str:
        prefix = ticket.intent.prefix
        with _failing_as(CheckpointErrorType.SAVE_FAILED, prefix, "saving in the background"):
            committed = self._saver.write(ticket, guard, progress)
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
        """Load into a model and an optimizer that exist, whatever the number of ranks was.

        Every byte is verified. Without a prefix, a damaged checkpoint is passed over for the newest intact
        one, with a warning. If this raises, the model's values are undefined.
        """
        chosen = options or LoadOptions()
        self._settle()
        guard = self._guard(chosen.timeout, cancel)
        with _failing_as(CheckpointErrorType.LOAD_FAILED, chosen.checkpoint_prefix, "loading"):
            return self._loader.load(model, optimizer, chosen, guard, progress)

    def list_checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints in the store, oldest first."""
        return store_index.list_checkpoints(self.storage)

    def delete_checkpoint(self, checkpoint_prefix: str) -> None:
        """Remove a checkpoint; called on one rank, or on all, where rank 0 does it."""
        self._settle()
        if self._coordinator.rank == 0:
            store_index.delete_checkpoint(self.storage, checkpoint_prefix)

    def wait(self) -> None:
        """Wait for the save in the background, and raise its error unless somebody has seen it."""
        self._settle()

    def close(self) -> None:
        """Wait for the save in the background and let go of the storage."""
        try:
            self._settle()
        finally:
            self._area.close()
            self.storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.settle()

    def _guard(self, timeout: float | None, cancel: threading.Event | None) -> Guard:
        return Guard(self._timeout if timeout is None else timeout, cancel)

    def _capturing(
        self, model: Stateful, optimizer: Stateful | None, options: SaveOptions
    ) -> Callable[[], Captured]:
        def capture() -> Captured:
            captured = Captured()
            model_state = model.state_dict()
            captured.add("model", model_state)
            if optimizer is not None and options.include_optimizer:
                captured.add("optimizer", _optimizer_state(optimizer, model, model_state))
            if options.include_rng_state:
                captured.add("rng", {str(self._coordinator.rank): random_state()})
            return captured

        return capture

    def _note_content(self, committed: Committed) -> None:
        stale = committed.content == self._last_content
        self._last_content = committed.content
        if stale and self._coordinator.rank == 0:
            warnings.warn(
                f"{committed.prefix} holds exactly what was saved before it: is the right state saved?",
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
