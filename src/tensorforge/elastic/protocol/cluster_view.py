"""The cluster as an observer sees it: one plain structure for the CLI, the dashboard and scripts."""

from __future__ import annotations

from datetime import datetime

import msgspec

from tensorforge.elastic.coordinator.journal_records import RescaleRecord, RunEnded
from tensorforge.elastic.coordinator.machine.cluster_state import ClusterState
from tensorforge.elastic.coordinator.machine.roster import Participant
from tensorforge.elastic.protocol.messages import State


class WorkerView(msgspec.Struct, kw_only=True):
    """One worker. A rank of -1 means that it is no member (a joiner, a standby or a leaver)."""

    id: str
    address: str
    rank: int
    status: str
    is_connected: bool
    incarnation: str
    joined_at: datetime
    last_seen_ms: float
    committed_step: int | None = None
    metrics: dict[str, float] = {}
    attributes: dict[str, str] = {}
    leave_reason: str | None = None


class ClusterView(msgspec.Struct, kw_only=True):
    """Everything there is to know about a run at one moment."""

    run_id: str
    phase: str
    generation: int
    formed_generation: int
    workers: list[WorkerView]
    waiting: list[WorkerView]
    desired_workers: int | None
    target_version: int = 0
    target_by: str = ""
    min_workers: int
    max_workers: int | None
    state: State
    losses: int
    consecutive_failures: int
    stale_messages: int
    refusals: int
    rescales: list[RescaleRecord]
    ended: RunEnded | None = None
    taken_at: datetime | None = None


def view(state: ClusterState, now: float, run_id: str, *, history: int = 20) -> ClusterView:
    """The cluster's state, with the last `history` rescales, newest last."""
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
        min_workers=config.min_workers,
        max_workers=config.max_workers,
        state=state.progress,
        losses=state.tolerance.losses,
        consecutive_failures=state.tolerance.consecutive_failures,
        stale_messages=state.stale_messages,
        refusals=state.refusals,
        rescales=state.history[-history:] if history else [],
        ended=state.ended,
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
