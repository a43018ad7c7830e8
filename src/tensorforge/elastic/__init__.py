"""Membership and rescaling: the cluster's vocabulary, the coordinator and its workers.

messages.py      what travels between worker and coordinator
timeouts.py      the ladder of waits
machine.py       the coordinator's decisions: pure, events in, instructions out
  inputs.py  instructions.py       what goes in, what comes out
  cluster_state.py                 what it knows, with roster.py, barrier.py, rescale_log.py, tolerance.py
  admission.py  departures.py      who is let in, who goes
  generations.py  deadlines.py     what is decided, and when; policy.py has the rules
  open_groups.py                    which groups may still be training where nobody sees them
records.py       what is remembered of it; view.py what is shown
journal.py       the machine's memory and the lease to write it
service.py       the gRPC shell around the machine
coordinator.py   all of it as one object; metrics.py, access.py beside it
connection.py    a worker's side of the stream
member.py        a process as a member: what it is told, what it answers
  worker_state.py  inbox.py  resend_buffer.py
worker.py        what training code talks to: a member with training state and data
client.py        what operators and launchers talk to
"""

from typing import TYPE_CHECKING, Any

from tensorforge.cluster.elastic_config import (
    AdaptationStrategy,
    ElasticTrainingConfig,
    RedistributionType,
    RescaleType,
)
from tensorforge.cluster.global_state import GlobalTrainingState
from tensorforge.cluster.rescaling import RescalingEvent
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.topology_holder import TopologyHolder
from tensorforge.cluster.workers import WORKER_LIFECYCLE, WorkerId, WorkerMetadata, WorkerStatus
from tensorforge.elastic.learning_rate import adapt_learning_rate

if TYPE_CHECKING:
    from tensorforge.elastic.client import CoordinatorClient
    from tensorforge.elastic.coordinator.coordinator import ElasticCoordinator
    from tensorforge.elastic.protocol.access import TlsOptions
    from tensorforge.elastic.protocol.messages import Formation, MemberReport
    from tensorforge.elastic.worker.hooks import StateHooks
    from tensorforge.elastic.worker.worker import ElasticWorker

_LAZY = {
    "CoordinatorClient": "client",
    "ElasticCoordinator": "coordinator.coordinator",
    "ElasticWorker": "worker.worker",
    "Formation": "protocol.messages",
    "MemberReport": "protocol.messages",
    "StateHooks": "worker.hooks",
    "TlsOptions": "protocol.access",
}


def __getattr__(name: str) -> Any:
    # gRPC and the database are only loaded by those who run or join a cluster.
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "WORKER_LIFECYCLE",
    "AdaptationStrategy",
    "ClusterTopology",
    "CoordinatorClient",
    "ElasticCoordinator",
    "ElasticTrainingConfig",
    "ElasticWorker",
    "Formation",
    "GlobalTrainingState",
    "MemberReport",
    "RedistributionType",
    "RescaleType",
    "RescalingEvent",
    "StateHooks",
    "TlsOptions",
    "TopologyHolder",
    "WorkerId",
    "WorkerMetadata",
    "WorkerStatus",
    "adapt_learning_rate",
]
