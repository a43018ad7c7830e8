"""Membership and rescaling: a coordinator decides who trains, workers follow.

A worker's message (`protocol/messages`) leaves its `worker/connection` and reaches
`coordinator/control_server`. The server gives it to `coordinator/machine`, a pure state machine, as an
input with its time. The machine returns instructions: entries for the `coordinator/journal`, messages for
workers, lines for the log. The server writes the entries first and sends the messages then, so whatever a
worker hears survives a restart. A worker's `inbox` applies a message to its `worker_state`; `worker/member`
answers it, and `worker/worker` is what training code uses. Operators and launchers use `client`: it sends
`protocol/commands`, which are inputs of the machine as well, and reads `protocol/cluster_view`, built from
the machine's state. Names of the cluster itself are in `tensorforge.cluster`.
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
from tensorforge.cluster.workers import WORKER_LIFECYCLE, WorkerId, WorkerMetadata, WorkerStatus
from tensorforge.elastic.learning_rate import adapt_learning_rate
from tensorforge.elastic.topology_holder import TopologyHolder

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
