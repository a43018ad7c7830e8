"""What can be asked of a checkpoint, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tensorforge.checkpoint.format.formats import CheckpointFormat, CompressionLevel
from tensorforge.errors import ConfigurationError
from tensorforge.resilience import RetryPolicy

if TYPE_CHECKING:
    from tensorforge.checkpoint.format.manifest import CheckpointManifest
    from tensorforge.checkpoint.save.chunk_reuse import Increment
    from tensorforge.checkpoint.validator import CompatibilityChecker, IntegrityChecker

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes in total, from worker threads, one call at a time."""

RESHARDING_STRATEGIES = ("parallel", "sequential")


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state to save: every torch module and optimizer is one."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state as a dictionary."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take over a state that `state_dict` returned earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How to save. `timeout` is in seconds; `None` means the checkpoint's default.

    `checkpoint_prefix=None` makes a name from the time; a name that exists already is an error, because
    checkpoints are never overwritten. With an `increment`, chunks that an earlier checkpoint holds are
    referred to instead of being written again.
    """

    checkpoint_prefix: str | None = None
    format: CheckpointFormat = CheckpointFormat.MULTI_SHARD
    compression_level: CompressionLevel = CompressionLevel.NONE
    include_optimizer: bool = True
    include_rng_state: bool = True
    timeout: float | None = None
    custom_metadata: Mapping[str, Any] = field(default_factory=dict)
    increment: Increment | None = None

    def __post_init__(self) -> None:
        _check_enum("format", self.format, CheckpointFormat)
        _check_enum("compression_level", self.compression_level, CompressionLevel)
        _check_timeout(self.timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load. `checkpoint_prefix=None` takes the newest checkpoint that proves to be intact.

    `skip_validation` leaves out the checks before reading; checksums are verified always. With
    `strict_mode=False` what does not match is left alone, or converted if only its type differs, and reported.
    """

    checkpoint_prefix: str | None = None
    load_optimizer: bool = True
    load_rng_state: bool = True
    resharding_strategy: str = "parallel"
    timeout: float | None = None
    skip_validation: bool = False
    strict_mode: bool = True

    def __post_init__(self) -> None:
        if self.resharding_strategy not in RESHARDING_STRATEGIES:
            raise ConfigurationError(
                "resharding_strategy", self.resharding_strategy, "must be parallel or sequential"
            )
        _check_timeout(self.timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """Where checkpoints live: a provider and its settings, or an address that `open_store` understands.

    `local` takes `base_path`; `memory` takes `name`; object stores (`s3`, `gs`, `az`) take `bucket`
    and `path`.
    """

    provider: str = "local"
    connection_settings: Mapping[str, str] = field(
        default_factory=lambda: {"base_path": "./checkpoints"}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """Everything that `DistributedCheckpoint.create` needs; `default_timeout` is in seconds."""

    storage: StorageOptions = field(default_factory=StorageOptions)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    integrity_checkers: tuple[IntegrityChecker, ...] = ()
    compatibility_checkers: tuple[CompatibilityChecker, ...] = ()
    default_timeout: float = 600.0

    def __post_init__(self) -> None:
        _check_timeout(self.default_timeout)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A line in the list of checkpoints."""

    prefix: str
    version: int
    timestamp: datetime
    world_size: int
    size_bytes: int
    format: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What a checkpoint and the model that loads it disagree about, by name."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes or self.dtypes)

    def summary(self) -> str:
        """All disagreements in one line."""
        parts = {
            "missing in the checkpoint": self.missing,
            "not in the model": self.unexpected,
            "other shape": self.shapes,
            "other type": self.dtypes,
        }
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A newer checkpoint that was passed over, and why."""

    prefix: str
    reason: str


class RandomStateOutcome(Enum):
    """What became of the random state: restored, derived for another world size, or left alone."""

    EXACT = "exact"
    DERIVED = "derived"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLoadResult:
    """What was loaded. The states are views of what the model and the optimizer hold now."""

    manifest: CheckpointManifest
    model_state: Mapping[str, Any]
    optimizer_state: Mapping[str, Any]
    source_world_size: int
    target_world_size: int
    was_resharded: bool
    custom_metadata: Mapping[str, Any]
    mismatch: Mismatch = Mismatch()
    rejected: tuple[Rejected, ...] = ()
    random_state: RandomStateOutcome = RandomStateOutcome.SKIPPED


def _check_enum(name: str, value: object, kind: type[Enum]) -> None:
    if not isinstance(value, kind):
        raise ConfigurationError(name, value, f"must be a {kind.__name__}")


def _check_timeout(value: float | None) -> None:
    if value is not None and not value > 0:
        raise ConfigurationError("timeout", value, "must be positive seconds")
