"""From the machine's state to the view of the cluster that clients see."""

from __future__ import annotations

from tensorforge.elastic.coordinator.machine.cluster_state import ClusterState
from tensorforge.elastic.coordinator.machine.roster import Participant
from tensorforge.elastic.protocol.cluster_view import ClusterView, WorkerView


def cluster_view(state: ClusterState, now: float, run_id: str, *, history: int = 20) -> ClusterView:
    """The cluster at `now`, with the last `history` rescales, newest last."""
    ranks = {worker.id: rank for rank, worker in enumerate(state.roster.members)}
    everybody = [_worker(state, p, ranks.get(p.id, -1), now) for p in state.roster]
    waiting = state.roster.waiting
    config = state.config
    return ClusterView(
        run_id=run_id,
        phase=state.phase.value,
        generation=state.generation,
        formed_generation=state.formed_generation,
        workers=sorted((w for w in everybody if w.id not in waiting), key=_by_rank),
        waiting=[w for w in everybody if w.id in waiting],
        desired_workers=state.desired_workers,
        target_version=state.target_version,
        target_by=state.target_by,
        target_requester=state.target_requester,
        min_workers=config.min_workers,
        max_workers=config.max_workers,
        state=state.progress,
        goal=None if state.terms is None else state.terms.goal,
        losses=state.tolerance.losses,
        consecutive_failures=state.tolerance.consecutive_failures,
        stale_messages=state.stale_messages,
        refusals=state.out.refusals,
        rescales=state.rescale_log.history[-history:] if history else [],
        ended=None if state.ended is None else state.ended.message,
        taken_at=state.utc(now),
    )


def _by_rank(worker: WorkerView) -> tuple[bool, int]:
    return (worker.rank < 0, worker.rank)


def _worker(state: ClusterState, participant: Participant, rank: int, now: float) -> WorkerView:
    progress = participant.progress
    return WorkerView(
        id=participant.id,
        address=f"{participant.worker.hostname}:{participant.worker.port}",
        rank=-1 if participant.id in state.roster.waiting else rank,
        status=participant.status.value,
        is_connected=participant.connection is not None,
        incarnation=participant.incarnation,
        joined_at=state.utc(participant.joined_at),
        last_seen_ms=round((now - participant.last_seen) * 1000, 1),
        committed_step=None if progress is None else progress.step,
        metrics={} if progress is None else progress.metrics,
        attributes=participant.attributes,
        leave_reason=participant.leave_reason,
    )
