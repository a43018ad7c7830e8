"""Data: every sample in exactly one committed step, moved as little as possible.

    shards.py         a range of an epoch's order, and the cut of an epoch into shards
    intervals.py      sets of positions as ranges
    order.py          position → sample: a keyed bijection with O(1) seek
    ledger.py         what committed steps have taken, and the proof that nothing came twice
    history.py        the committed steps of a run in a file
    balance.py        who keeps and who receives how much
    plan.py           a redistribution as frozen data
    redistributor.py  from one topology to the next
    validation.py     every way in which a plan can be wrong
    segment.py        the file format of shards
    stream.py         a range of samples as the bytes that travel
    store.py          the shards that a worker holds
    packed.py         a whole data set on a blob store: the origin
    wire.py           what two workers say to each other
    server.py         the side that gives
    fetch.py          the side that takes
    buffers.py        memory for chunks on their way
    transfer.py       the execution of a plan
    loader.py         batches in the order of the ledger, loaded ahead

Only `loader` needs torch, and is imported when it is asked for; numpy is imported by the call that needs it.
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
from tensorforge.data.segments.segment import SampleSchema
from tensorforge.data.segments.shard_store import DatasetInfo, ShardStore
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
