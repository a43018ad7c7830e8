"""All timeouts of the control plane, derived from three settings so that their order always holds:

heartbeat  <  ping_timeout  <  silence  <=  barrier  <  worker_patience
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorforge.cluster.elastic_config import ElasticTrainingConfig

RECONNECT_LEAST, RECONNECT_MOST = 0.05, 1.0
"""Seconds: the pause before a worker tries to reconnect grows from the first to the second."""

_SUSPICION_GRACE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """All waits of the control plane, in seconds.

    `heartbeat`: a worker sends a heartbeat this often; the connection is pinged this often, too.
    `ping_timeout`: an unanswered ping breaks the stream after this. Together with one interval that is less
    than `silence`, so a frozen process is noticed within `silence`.
    `silence`: a worker that gives no sign of life for this long has failed.
    `comeback`: members have this long to connect to a restarted coordinator: `silence` and two of the
    longest pauses between a worker's attempts to reconnect.
    `suspicion`: a failed collective waits this long for a broken stream that explains it.
    `stability`: joins wait until there was no change for this long.
    `pause`: how long the cluster may stay below the minimum.
    `barrier`: how long members may take to stop, and again to form. Never shorter than `silence`, so that a
    lost member is noticed before the barrier gives up.
    `worker_patience`: how long a worker waits for a formation. Longer than the coordinator's deadlines, so
    that the coordinator decides and never a worker by itself.
    """

    heartbeat: float
    ping_timeout: float
    silence: float
    comeback: float
    suspicion: float
    stability: float
    pause: float
    barrier: float
    worker_patience: float

    def ping_options(self) -> list[tuple[str, int]]:
        """The gRPC options by which both sides ping each other."""
        milliseconds = max(1, round(self.ping_timeout * 1000))
        return [
            ("grpc.keepalive_time_ms", max(1, round(self.heartbeat * 1000))),
            ("grpc.keepalive_timeout_ms", milliseconds),
            ("grpc.http2.ping_timeout_ms", milliseconds),
            ("grpc.http2.max_pings_without_data", 0),
        ]

    @classmethod
    def derive(cls, config: ElasticTrainingConfig) -> Timeouts:
        """The timeouts for a configuration."""
        silence = config.worker_heartbeat_timeout_ms / 1000
        rescale = config.rescale_timeout_ms / 1000
        barrier = max(rescale, silence)
        return cls(
            heartbeat=silence / 3,
            ping_timeout=silence / 2,
            silence=silence,
            comeback=silence + 2 * RECONNECT_MOST,
            suspicion=min(_SUSPICION_GRACE, silence / 10),
            stability=config.stability_window_ms / 1000,
            pause=rescale,
            barrier=barrier,
            worker_patience=2 * barrier + silence,
        )
