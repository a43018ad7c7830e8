"""The options of saving, loading and storage, the result of a load, and the store that options describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tensorforge.checkpoint.format.formats import CheckpointFormat, CompressionLevel
from tensorforge.errors import ConfigurationError
from tensorforge.resilience import RetryPolicy
from tensorforge.storage.blobs import BlobStore
from tensorforge.storage.opening import OPENERS, open_store
from tensorforge.validation import member, one_of

if TYPE_CHECKING:
    from tensorforge.checkpoint.format.manifest import CheckpointManifest
    from tensorforge.checkpoint.save.chunk_reuse import Increment
    from tensorforge.checkpoint.validator import CompatibilityChecker, IntegrityChecker

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and in total. Threads call it, but never two at the same time."""

RESHARDING_STRATEGIES = ("parallel", "sequential")


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved, such as a torch module or optimizer."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state as a dictionary."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Replace the state by one that `state_dict` returned earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How to save.

    `checkpoint_prefix`: the name of the checkpoint; `None` makes a name from the time. A name that exists is
    an error, because checkpoints are never overwritten.
    `timeout`: seconds for the save; `None` for the default of `DistributedCheckpoint`.
    `increment`: finds chunks of an earlier checkpoint; the manifest refers to them, and they are not
    written again.
    `extra_state`: more state of the caller, with or without tensors. It is saved beside model and optimizer,
    and a load returns it. All ranks pass the same one.
    """

    checkpoint_prefix: str | None = None
    format: CheckpointFormat = CheckpointFormat.MULTI_SHARD
    compression_level: CompressionLevel = CompressionLevel.NONE
    include_optimizer: bool = True
    include_rng_state: bool = True
    timeout: float | None = None
    custom_metadata: Mapping[str, Any] = field(default_factory=dict)
    increment: Increment | None = None
    extra_state: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        member("format", self.format, CheckpointFormat)
        member("compression_level", self.compression_level, CompressionLevel)
        _check_timeout(self.timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load.

    `checkpoint_prefix`: which checkpoint; `None` loads the newest intact one.
    `skip_validation`: leave out the checks before reading. Checksums are verified in any case.
    `strict_mode`: raise an error if the checkpoint does not match the model. With `False` a tensor of another
    element type is converted, other mismatches are left alone, and the result lists both.
    """

    checkpoint_prefix: str | None = None
    load_optimizer: bool = True
    load_rng_state: bool = True
    resharding_strategy: str = "parallel"
    timeout: float | None = None
    skip_validation: bool = False
    strict_mode: bool = True

    def __post_init__(self) -> None:
        one_of("resharding_strategy", self.resharding_strategy, RESHARDING_STRATEGIES)
        _check_timeout(self.timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """Where checkpoints are stored: a provider and its settings.

    `local` takes `base_path`; `memory` takes `name`; object stores (`s3`, `gs`, `az`) take `bucket` and
    `path`.
    """

    provider: str = "local"
    connection_settings: Mapping[str, str] = field(
        default_factory=lambda: {"base_path": "./checkpoints"}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """The options of `DistributedCheckpoint.create`; `default_timeout` is in seconds."""

    storage: StorageOptions = field(default_factory=StorageOptions)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    integrity_checkers: tuple[IntegrityChecker, ...] = ()
    compatibility_checkers: tuple[CompatibilityChecker, ...] = ()
    default_timeout: float = 600.0

    def __post_init__(self) -> None:
        _check_timeout(self.default_timeout)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One entry in the list of checkpoints."""

    prefix: str
    version: int
    timestamp: datetime
    world_size: int
    size_bytes: int
    format: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The differences between a checkpoint and the model that loads it, by the names of tensors."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes or self.dtypes)

    def summary(self) -> str:
        """All differences in one line."""
        parts = {
            "missing in the checkpoint": self.missing,
            "not in the model": self.unexpected,
            "other shape": self.shapes,
            "other type": self.dtypes,
        }
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A newer checkpoint that was not loaded, and why."""

    prefix: str
    reason: str


class RandomStateOutcome(Enum):
    """Whether a load restored the random state, derived one for another world size, or left it alone."""

    EXACT = "exact"
    DERIVED = "derived"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLoadResult:
    """What was loaded. The states are the current ones of the model and the optimizer, not copies."""

    manifest: CheckpointManifest
    model_state: Mapping[str, Any]
    optimizer_state: Mapping[str, Any]
    source_world_size: int
    target_world_size: int
    was_resharded: bool
    custom_metadata: Mapping[str, Any]
    extra_state: Mapping[str, Any] = field(default_factory=dict)
    mismatch: Mismatch = Mismatch()
    rejected: tuple[Rejected, ...] = ()
    random_state: RandomStateOutcome = RandomStateOutcome.SKIPPED


def create_storage(options: StorageOptions) -> BlobStore:
    """Open the store that the options describe; `ConfigurationError` if they name no store."""
    settings = dict(options.connection_settings)
    if options.provider == "local":
        address = settings.pop("base_path", "./checkpoints")
    elif options.provider == "memory":
        settings.pop("base_path", None)
        address = f"memory://{settings.pop('name', '')}"
    elif options.provider in OPENERS:
        bucket = settings.pop("bucket", "")
        if not bucket:
            raise ConfigurationError("bucket", bucket, f"{options.provider} needs one")
        address = f"{options.provider}://{bucket}/{settings.pop('path', '')}".rstrip("/")
    else:
        known = ", ".join(sorted({"local", *OPENERS} - {"file"}))
        raise ConfigurationError("provider", options.provider, f"must be one of {known}")
    if settings:
        raise ConfigurationError(
            "connection_settings", sorted(settings), f"{options.provider} has no such settings"
        )
    return open_store(address)


def _check_timeout(value: float | None) -> None:
    if value is not None and not value > 0:
        raise ConfigurationError("timeout", value, "must be positive seconds")
