"""The ladder of timeouts, derived from two settings so that its rungs cannot be put in a wrong order.

heartbeat  <  ping_timeout  <  silence  <=  barrier  <  worker_patience
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorforge.cluster.elastic_config import ElasticTrainingConfig

RECONNECT_LEAST, RECONNECT_MOST = 0.05, 1.0
"""The pause before a worker tries to reconnect grows from the first to the second, in seconds."""

_SUSPICION_GRACE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """All waits of the control plane, in seconds.

    `heartbeat`: a worker gives a sign of life this often; the transport pings this often, too.
    `ping_timeout`: a ping that is not answered within this breaks the stream; one interval later at the
    latest, a frozen process is known to be gone, which makes `silence` at most.
    `silence`: no sign of life for this long is a failure.
    `comeback`: members have this long to find a restarted coordinator; longer than `silence` by two of the
    longest pauses between a worker's attempts to reconnect.
    `suspicion`: a reported collective failure waits this long for a broken stream that explains it.
    `stability`: joins wait for this much quiet.
    `pause`: how long training may stay below the minimum.
    `barrier`: each of the two halves of a rescale (everybody stopped; everybody formed). Never shorter
    than `silence`: otherwise a rescale would give up before it could know who is missing.
    `worker_patience`: how long a worker waits for a formation; longer than the coordinator's own
    deadlines, so that the coordinator decides and never a worker by itself.
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

    @classmethod
    def derive(cls, config: ElasticTrainingConfig) -> Timeouts:
        """The ladder for a configuration."""
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
