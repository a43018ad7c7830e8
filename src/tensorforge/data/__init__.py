"""Data: every sample is consumed by exactly one committed step, and a change of workers moves few samples.

An epoch is a sequence of positions, cut into shards (`plan/shards`). An order (`plan/order`) maps a position to
a sample. A ledger (`plan/ledger`) records which positions committed steps have consumed; `step_history` writes
the steps to a file and proves from it that no sample came twice. When the workers change, the redistributor
(`plan/redistributor`) plans which worker holds which shards next.

A shard on its way: `pack_array` writes the data set as segments to a blob store (`segments/packed_dataset`),
the origin. The transfer manager (`transfer/transfer_manager`) takes the plan and fetches each shard from a
worker's server (`transfer/shard_server`) or the origin, chunk by chunk (`transfer/shard_fetcher`), into a part
file (`segments/part_file`), which becomes a segment of the worker's store (`segments/shard_store`).
`shard_loader` reads samples from there as batches. `plan` is pure; `transfer` builds on `segments`, never the
reverse. Only `shard_loader` needs torch and is imported on first use; numpy is imported by calls that use it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tensorforge.data.plan.intervals import IntervalSet
from tensorforge.data.plan.ledger import Ledger, LedgerProof
from tensorforge.data.plan.order import Order, ShardLocalOrder, ShuffledOrder
from tensorforge.data.plan.plan import DataRedistributionPlan, DataTransfer
from tensorforge.data.plan.plan_validation import PlanProblem, PlanProblemKind, PlanValidation
from tensorforge.data.plan.redistributor import DataRedistributor
from tensorforge.data.plan.shards import DataShard, partition
from tensorforge.data.segments.packed_dataset import (
    Origin,
    PackedDataset,
    pack_array,
    pack_records,
    token_windows,
)
from tensorforge.data.segments.samples import DatasetInfo, SampleSchema
from tensorforge.data.segments.shard_store import ShardStore
from tensorforge.data.step_history import HistoryProof, HistoryWriter, prove_history
from tensorforge.data.transfer.chunk_buffers import BufferPool, HostBuffers
from tensorforge.data.transfer.shard_server import ShardServer
from tensorforge.data.transfer.transfer_manager import (
    DataTransferManager,
    TransferJob,
    TransferReport,
)

if TYPE_CHECKING:
    from tensorforge.data.shard_loader import LoaderOptions, ShardBatch, ShardLoader, StepLoader

_NEEDS_TORCH = {"LoaderOptions", "ShardBatch", "ShardLoader", "StepLoader"}

__all__ = [
    "BufferPool",
    "DataRedistributionPlan",
    "DataRedistributor",
    "DataShard",
    "DataTransfer",
    "DataTransferManager",
    "DatasetInfo",
    "HistoryProof",
    "HistoryWriter",
    "HostBuffers",
    "IntervalSet",
    "Ledger",
    "LedgerProof",
    "LoaderOptions",
    "Order",
    "Origin",
    "PackedDataset",
    "PlanProblem",
    "PlanProblemKind",
    "PlanValidation",
    "SampleSchema",
    "ShardBatch",
    "ShardLoader",
    "ShardLocalOrder",
    "ShardServer",
    "ShardStore",
    "ShuffledOrder",
    "StepLoader",
    "TransferJob",
    "TransferReport",
    "pack_array",
    "pack_records",
    "partition",
    "prove_history",
    "token_windows",
]


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        return getattr(importlib.import_module("tensorforge.data.shard_loader"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
