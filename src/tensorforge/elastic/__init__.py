"""Membership and rescaling: the cluster's vocabulary and the rules of its changes."""

from tensorforge.cluster.config import (
    AdaptationStrategy,
    ElasticTrainingConfig,
    RedistributionType,
)
from tensorforge.cluster.events import RescaleType, RescalingEvent
from tensorforge.cluster.state import GlobalTrainingState
from tensorforge.cluster.topology import ClusterTopology, TopologyHolder
from tensorforge.cluster.worker import WORKER_LIFECYCLE, WorkerId, WorkerMetadata, WorkerStatus
from tensorforge.elastic.learning_rate import adapt_learning_rate

__all__ = [
    "WORKER_LIFECYCLE",
    "AdaptationStrategy",
    "ClusterTopology",
    "ElasticTrainingConfig",
    "GlobalTrainingState",
    "RedistributionType",
    "RescaleType",
    "RescalingEvent",
    "TopologyHolder",
    "WorkerId",
    "WorkerMetadata",
    "WorkerStatus",
    "adapt_learning_rate",
]
