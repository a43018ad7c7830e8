"""The cluster as the CLI, the launcher and scripts see it: plain data that the coordinator serves as JSON."""

from __future__ import annotations

from datetime import datetime

import msgspec

from tensorforge.cluster.goal import Goal
from tensorforge.elastic.protocol.messages import Ended, State
from tensorforge.elastic.protocol.reasons import Departure, Requester
from tensorforge.elastic.protocol.rescale_record import RescaleRecord


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
    metrics: dict[str, float | None] = {}
    attributes: dict[str, str] = {}
    leave_reason: Departure | None = None


class ClusterView(msgspec.Struct, kw_only=True):
    """A run at one moment.

    `desired_workers` is the wanted number of workers; `target_version` counts how often it was set, and
    `target_by` and `target_requester` say who set it last.
    `goal` is how far the workers' script wants to train. `rescales` has the newest last.
    """

    run_id: str
    phase: str
    generation: int
    formed_generation: int
    workers: list[WorkerView]
    waiting: list[WorkerView]
    desired_workers: int | None
    target_version: int = 0
    target_by: str = ""
    target_requester: Requester = Requester.OPERATOR
    min_workers: int
    max_workers: int | None
    state: State
    goal: Goal | None = None
    losses: int
    consecutive_failures: int
    stale_messages: int
    refusals: int
    rescales: list[RescaleRecord]
    ended: Ended | None = None
    taken_at: datetime | None = None
