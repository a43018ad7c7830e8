"""Distributed checkpoints: complete or absent, verified byte by byte, loadable by any number of ranks.

The way of a tensor to disk: `api` receives the model; `model_state` and `tensors` describe it as named boxes.
`save.saving` runs the protocol between the ranks. `save.assignment` and `save.write_plan` decide which rank
writes which box into which file; `save.staging` copies; `save.shard_writer` writes; the manifest commits.

The way back, on any number of ranks: `load.loading` chooses a checkpoint; `load.targets` matches it with the
model; `load.resharding` plans the reads; `load.tensor_reader` and `load.stored_chunks` read and verify chunks.

`format` defines manifest and files, `ranks` the messages between ranks; `store_index` lists and deletes.
Importing this package imports neither torch nor numpy; names that need them are imported at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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
    create_storage,
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
