"""Distributed checkpoints: saved whole or not at all, proven intact, loadable by any number of ranks.

    pure          boxes, dtypes, formats, manifest, layout, assignment, planning, resharding, trees
    bytes         chunks (verified bytes out of files), codecs, validator, shelf (what is in a store)
    with torch    tensors, state, optimizers, held, image, staging, writer, reader, targets
    together      coordinators, agreement, saving, loading, api

Importing this package imports neither torch nor numpy; the names that need them come when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tensorforge.checkpoint.factory import create_storage
from tensorforge.checkpoint.faults import FaultToleranceHandler
from tensorforge.checkpoint.format.formats import CheckpointFormat, CompressionLevel
from tensorforge.checkpoint.format.manifest import CheckpointManifest, ShardData, TensorMetadata
from tensorforge.checkpoint.options import (
    CheckpointInfo,
    CheckpointLoadResult,
    CheckpointOptions,
    LoadOptions,
    Mismatch,
    RandomStateOutcome,
    Rejected,
    SaveOptions,
    Stateful,
    StorageOptions,
)
from tensorforge.checkpoint.ranks.coordinators import (
    DistributedCoordinator,
    InMemoryRanks,
    SingleProcess,
    TorchDistributed,
)
from tensorforge.checkpoint.validator import (
    CheckpointValidator,
    CompatibilityChecker,
    EveryByteIsIntact,
    Finding,
    IntegrityChecker,
    Severity,
    ValidationReport,
)
from tensorforge.errors import CheckpointError, CheckpointErrorType
from tensorforge.resilience import RetryPolicy
from tensorforge.storage.blobs import BlobStore as CheckpointStorage

if TYPE_CHECKING:
    from tensorforge.checkpoint.api import DistributedCheckpoint, SaveHandle, StaleSaveWarning
    from tensorforge.checkpoint.load.loading import CheckpointFallbackWarning
    from tensorforge.checkpoint.tensors import ShardingSpec, TensorShard

_LAZY = {
    "CheckpointFallbackWarning": "load.loading",
    "DistributedCheckpoint": "api",
    "SaveHandle": "api",
    "ShardingSpec": "tensors",
    "StaleSaveWarning": "api",
    "TensorShard": "tensors",
}

__all__ = [
    "CheckpointError",
    "CheckpointErrorType",
    "CheckpointFallbackWarning",
    "CheckpointFormat",
    "CheckpointInfo",
    "CheckpointLoadResult",
    "CheckpointManifest",
    "CheckpointOptions",
    "CheckpointStorage",
    "CheckpointValidator",
    "CompatibilityChecker",
    "CompressionLevel",
    "DistributedCheckpoint",
    "DistributedCoordinator",
    "EveryByteIsIntact",
    "FaultToleranceHandler",
    "Finding",
    "InMemoryRanks",
    "IntegrityChecker",
    "LoadOptions",
    "Mismatch",
    "RandomStateOutcome",
    "Rejected",
    "RetryPolicy",
    "SaveHandle",
    "SaveOptions",
    "Severity",
    "ShardData",
    "ShardingSpec",
    "SingleProcess",
    "StaleSaveWarning",
    "Stateful",
    "StorageOptions",
    "TensorMetadata",
    "TensorShard",
    "TorchDistributed",
    "ValidationReport",
    "create_storage",
]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
