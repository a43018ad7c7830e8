"""Every error that TensorForge raises on purpose.

    TensorForgeError
    ├── InvalidInputError              the caller passed something wrong (also a ValueError)
    │   ├── ConfigurationError         a value breaks the rule of its field
    │   └── EncodingError              data from a file or a peer is not what it claims to be
    ├── NotFoundError                  the named thing does not exist (also a LookupError)
    ├── ConflictError                  the present state does not allow it
    │   ├── AlreadyExistsError         the name is taken
    │   ├── TransitionError            the lifecycle has no such transition
    │   ├── StaleGenerationError       the sender belongs to an older generation
    │   ├── LostRaceError              another caller changed it first: read again, then decide
    │   └── ClosedError                used after it was closed
    ├── CapacityError                  there is no room
    ├── AuthenticationError            the caller is not known
    ├── PermissionDeniedError          the caller is known, but may not do this
    ├── UnavailableError               a peer or a service cannot be reached now (retryable)
    │   └── DeadlineExceededError      it did not answer in time (retryable)
    ├── IntegrityError                 bytes are not the ones that were written
    ├── TransferError                  shards of a plan did not arrive
    ├── TransferCancelledError         the transfers were stopped
    ├── CheckpointError                a checkpoint could not be saved, loaded or trusted
    └── TrainingAbortedError           the run has ended before its goal

A message says what happened, to what, what was expected and what to do. `retryable` tells `RetryPolicy`
whether the same call may succeed later. `docs/errors.md` is made from this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, ClassVar

_LONGEST_SHOWN = 200


class TensorForgeError(Exception):
    """The base of every error that TensorForge raises on purpose."""

    retryable: ClassVar[bool] = False


class InvalidInputError(TensorForgeError, ValueError):
    """The caller passed something that can never work; the call must be changed."""


class ConfigurationError(InvalidInputError):
    """A setting or an argument breaks the rule of its field."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        shown = repr(value)
        if len(shown) > _LONGEST_SHOWN:
            shown = f"{shown[:_LONGEST_SHOWN]}…"
        super().__init__(f"{field} = {shown}: {rule}")
        self.field = field
        self.value = value
        self.rule = rule


class EncodingError(InvalidInputError):
    """Encoded data is malformed, of another type, or of an unknown version."""


class NotFoundError(TensorForgeError, LookupError):
    """The named thing does not exist."""


class ConflictError(TensorForgeError):
    """The request is well formed, but the present state does not allow it."""


class AlreadyExistsError(ConflictError):
    """The name is taken; nothing was changed."""


class TransitionError(ConflictError):
    """A lifecycle has no transition from the current state to the requested one."""

    def __init__(
        self, lifecycle: str, current: Enum, requested: Enum, allowed: Iterable[Enum]
    ) -> None:
        self.lifecycle = lifecycle
        self.current = current
        self.requested = requested
        self.allowed = tuple(allowed)
        names = ", ".join(str(state.value) for state in self.allowed) or "nothing: it is final"
        super().__init__(
            f"{lifecycle} cannot go from {current.value} to {requested.value}; allowed: {names}"
        )


class StaleGenerationError(ConflictError):
    """A message of an older generation or incarnation; its sender is fenced."""


class LostRaceError(ConflictError):
    """Another caller changed the thing after this caller had read it; this call changed nothing."""


class ClosedError(ConflictError):
    """The object was closed, or was never opened."""


class CapacityError(TensorForgeError):
    """There is no room for the request."""

    def __init__(self, message: str, *, requested: int, available: int) -> None:
        super().__init__(message)
        self.requested = requested
        self.available = available


class AuthenticationError(TensorForgeError):
    """The token or certificate is missing, unknown, expired or revoked."""


class PermissionDeniedError(TensorForgeError):
    """The caller is known, but its token lacks the scope that this needs."""


class UnavailableError(TensorForgeError):
    """A peer or a service cannot be reached at the moment."""

    retryable: ClassVar[bool] = True


class DeadlineExceededError(UnavailableError, TimeoutError):
    """An answer did not come within the time that was allowed for it."""


class IntegrityError(TensorForgeError):
    """Bytes differ from those that were written: a checksum does not match."""


class TransferError(TensorForgeError):
    """Shards of a plan did not arrive; `failures` has the reason for each. Shards that arrived are kept."""

    def __init__(self, message: str, failures: Mapping[str, Exception]) -> None:
        super().__init__(message)
        self.failures = dict(failures)


class TransferCancelledError(TensorForgeError):
    """The transfers were stopped; shards that had arrived are kept for the next attempt."""


class CheckpointErrorType(Enum):
    """What went wrong with a checkpoint."""

    UNKNOWN = "unknown"
    SAVE_FAILED = "save_failed"
    LOAD_FAILED = "load_failed"
    VALIDATION_FAILED = "validation_failed"
    CORRUPTED_CHECKPOINT = "corrupted_checkpoint"
    INCOMPATIBLE_VERSION = "incompatible_version"
    TIMEOUT = "timeout"
    STORAGE_ERROR = "storage_error"


class CheckpointError(TensorForgeError):
    """A checkpoint could not be saved, loaded or trusted."""

    def __init__(
        self,
        message: str,
        checkpoint_path: str = "",
        type: CheckpointErrorType = CheckpointErrorType.UNKNOWN,  # noqa: A002  the specification's name
    ) -> None:
        super().__init__(message)
        self.checkpoint_path = checkpoint_path
        self.type = type


class TrainingAbortedError(TensorForgeError):
    """The run has ended before its goal: too many failures, too few workers, or a user's decision."""

    def __init__(self, reason: str, **facts: Any) -> None:
        super().__init__(reason)
        self.reason = reason
        self.facts = facts
