"""Data: every sample in exactly one committed step, moved as little as possible.

    shards.py       a range of an epoch's order, and the cut of an epoch into shards
    intervals.py    sets of positions as ranges
    order.py        position → sample: a keyed bijection with O(1) seek
    ledger.py       what committed steps have taken, and the proof that nothing came twice

Nothing here imports torch; numpy is imported by the call that needs it.
"""

from tensorforge.data.intervals import IntervalSet
from tensorforge.data.ledger import Ledger, LedgerProof
from tensorforge.data.order import Order, ShardLocalOrder, ShuffledOrder
from tensorforge.data.shards import DataShard, partition

__all__ = [
    "DataShard",
    "IntervalSet",
    "Ledger",
    "LedgerProof",
    "Order",
    "ShardLocalOrder",
    "ShuffledOrder",
    "partition",
]
