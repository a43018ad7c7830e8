"""What to do when something fails: try again what may be tried again, undo the rest, name the kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tensorforge.checkpoint import store_index
from tensorforge.checkpoint.format.manifest import SUFFIX, CheckpointManifest, encode_manifest
from tensorforge.errors import (
    AlreadyExistsError,
    AuthenticationError,
    CapacityError,
    CheckpointError,
    CheckpointErrorType,
    DeadlineExceededError,
    IntegrityError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from tensorforge.resilience import RetryPolicy
from tensorforge.storage.blobs import BlobStore

Result = TypeVar("Result")

_STORAGE = (
    AuthenticationError,
    CapacityError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    OSError,
)


class FaultToleranceHandler:
    """Retries and rollback for one store."""

    def __init__(self, storage: BlobStore, retry_policy: RetryPolicy | None = None) -> None:
        self.storage = storage
        self.retry_policy = retry_policy or RetryPolicy()

    def execute_with_retry(self, operation: Callable[[], Result]) -> Result:
        """Run an operation that may be repeated; only errors that are marked retryable are."""
        return self.retry_policy.run(operation)

    def rollback(self, checkpoint: str) -> None:
        """Remove every trace of a checkpoint, given by prefix or by its manifest's key."""
        prefix = checkpoint.removesuffix(SUFFIX)
        self.execute_with_retry(lambda: store_index.erase(self.storage, prefix))

    def commit(self, manifest: CheckpointManifest) -> None:
        """Store a manifest under its new key.

        Creating is not repeatable as it is: an attempt whose answer was lost may have succeeded. So when the
        key turns out to be taken, the content decides whose it is.
        """
        document = encode_manifest(manifest)

        def attempt() -> None:
            try:
                self.storage.create(manifest.key, document)
            except AlreadyExistsError:
                if self.storage.read(manifest.key) != document:
                    raise

        self.execute_with_retry(attempt)


def classify(error: BaseException, otherwise: CheckpointErrorType) -> CheckpointErrorType:
    """Which kind of checkpoint error another error is."""
    if isinstance(error, CheckpointError):
        return error.type
    if isinstance(error, DeadlineExceededError):
        return CheckpointErrorType.TIMEOUT
    if isinstance(error, IntegrityError):
        return CheckpointErrorType.CORRUPTED_CHECKPOINT
    if isinstance(error, _STORAGE):
        return CheckpointErrorType.STORAGE_ERROR
    return otherwise


def as_checkpoint_error(
    error: BaseException, path: str, otherwise: CheckpointErrorType, what: str
) -> CheckpointError:
    """The same failure as a `CheckpointError`."""
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"{what}: {error}", path, classify(error, otherwise))
