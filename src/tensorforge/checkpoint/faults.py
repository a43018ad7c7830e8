"""Failures of saves and loads: repeat what may be repeated, undo the rest, and classify the error."""

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
        """Run an operation, and run it again after an error that is marked as retryable."""
        return self.retry_policy.run(operation)

    def rollback(self, checkpoint: str) -> None:
        """Remove all files of a checkpoint, given by its prefix or by the key of its manifest."""
        prefix = checkpoint.removesuffix(SUFFIX)
        self.execute_with_retry(lambda: store_index.delete_files(self.storage, prefix))

    def commit(self, manifest: CheckpointManifest) -> None:
        """Store a manifest under a key that must be new.

        An attempt whose answer was lost may have succeeded. So a key that is taken is an error only if its
        content is not this manifest.
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
    """The kind of checkpoint error that describes `error`; `otherwise` if none is more specific."""
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
    """The same failure as a `CheckpointError`; one that is a `CheckpointError` already is returned as it is."""
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"{what}: {error}", path, classify(error, otherwise))
