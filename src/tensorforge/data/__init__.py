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

Nothing here imports torch; numpy is imported by the call that needs it.
"""

from tensorforge.data.history import HistoryProof, HistoryWriter, prove_history
from tensorforge.data.intervals import IntervalSet
from tensorforge.data.ledger import Ledger, LedgerProof
from tensorforge.data.order import Order, ShardLocalOrder, ShuffledOrder
from tensorforge.data.plan import DataRedistributionPlan, DataTransfer
from tensorforge.data.redistributor import DataRedistributor
from tensorforge.data.shards import DataShard, partition
from tensorforge.data.validation import PlanProblem, PlanProblemKind, PlanValidation

__all__ = [
    "DataRedistributionPlan",
    "DataRedistributor",
    "DataShard",
    "DataTransfer",
    "HistoryProof",
    "HistoryWriter",
    "IntervalSet",
    "Ledger",
    "LedgerProof",
    "Order",
    "PlanProblem",
    "PlanProblemKind",
    "PlanValidation",
    "ShardLocalOrder",
    "ShuffledOrder",
    "partition",
    "prove_history",
]
