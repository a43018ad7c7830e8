"""Retention: decides which checkpoints of a run are kept and which are deleted, with reasons. Pure.

The rules, in order:

1. A checkpoint that is being created is kept until it counts as abandoned.
2. A checkpoint that cannot be restored is deleted: it or one of its ancestors is corrupted or missing.
3. Of the others, those that are too old or not among the newest are deleted,
4. except the newest restorable one, the newest verified one, and the best by the policy's metric.
   If no checkpoint of the run has that metric, all that can be restored are kept: which are best is not known.
5. The ancestors of a kept checkpoint are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from tensorforge.catalog.chains.chains import by_id, lineage, restorable_ids
from tensorforge.catalog.chains.records import (
    CheckpointRecord,
    CheckpointState,
    GcPolicy,
    metric_of,
)


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """Whether one checkpoint is kept, and why."""

    record: CheckpointRecord
    keep: bool
    reasons: tuple[str, ...]

    @property
    def checkpoint_id(self) -> str:
        """The id of the checkpoint."""
        return self.record.checkpoint_id


def is_gc_eligible(
    checkpoint: CheckpointRecord,
    policy: GcPolicy,
    latest_step: int,
    now: datetime,
    is_best: bool,
    newer: int = 0,
) -> bool:
    """Whether the policy deletes a checkpoint, if no other one builds on it.

    `latest_step` is the step of the newest restorable checkpoint of the run, which is never deleted. `is_best`
    says whether this one is among the best. `newer` is the number of newer restorable checkpoints.
    """
    return bool(_grounds(checkpoint, policy, latest_step, now, is_best, newer))


def decide_retention(
    records: Iterable[CheckpointRecord], policy: GcPolicy, now: datetime
) -> tuple[RetentionDecision, ...]:
    """The decisions about all records of one run, newest first, without deleted ones.

    All ancestors of a checkpoint that is kept are kept, too.
    """
    live = [record for record in records if record.state is not CheckpointState.DELETED]
    known = by_id(live)
    newest_first = sorted(live, key=lambda record: record.recency, reverse=True)
    intact = restorable_ids(known)
    restorable = [record for record in newest_first if record.checkpoint_id in intact]
    protected = _protections(restorable, policy)
    grounds = _all_grounds(newest_first, restorable, set(protected), policy, now)
    kept = {record.checkpoint_id for record in live if not grounds[record.checkpoint_id]}
    needed = _needed_by(kept, known, intact)
    return tuple(
        _decide(record, grounds[record.checkpoint_id], protected, needed) for record in newest_first
    )


def _decide(
    record: CheckpointRecord,
    grounds: tuple[str, ...],
    protected: Mapping[str, tuple[str, ...]],
    needed: Mapping[str, str],
) -> RetentionDecision:
    name = record.checkpoint_id
    reasons = list(protected.get(name, ()))
    if name in needed:
        reasons.append(f"{needed[name]} builds on it")
    if grounds and not reasons:
        return RetentionDecision(record, False, grounds)
    if not reasons:
        creating = record.state is CheckpointState.CREATING
        reasons.append("it is being created" if creating else "within the limits of age and number")
    return RetentionDecision(record, True, tuple(reasons))


def _protections(
    restorable: list[CheckpointRecord], policy: GcPolicy
) -> dict[str, tuple[str, ...]]:
    reasons: dict[str, list[str]] = {}
    if restorable:
        reasons[restorable[0].checkpoint_id] = ["the newest restorable checkpoint of the run"]
    verified = next((record for record in restorable if record.verified_at is not None), None)
    if verified is not None:
        reasons.setdefault(verified.checkpoint_id, []).append("the newest verified checkpoint")
    if policy.keep_best_n and not any(policy.metric_key in r.metrics for r in restorable):
        text = f"no checkpoint of the run has {policy.metric_key!r}, by which the best are kept"
        for record in restorable:
            reasons.setdefault(record.checkpoint_id, []).append(text)
    for rank, record in enumerate(best_by_metric(restorable, policy), 1):
        value = record.metrics[policy.metric_key]
        text = f"number {rank} of the best {policy.keep_best_n} by {policy.metric_key} ({value:g})"
        reasons.setdefault(record.checkpoint_id, []).append(text)
    return {name: tuple(texts) for name, texts in reasons.items()}


def best_by_metric(
    records: Iterable[CheckpointRecord], policy: GcPolicy
) -> tuple[CheckpointRecord, ...]:
    """The best `keep_best_n` by the policy's metric, best first; of equal ones the newer comes first.

    A checkpoint without the metric, or with NaN, never qualifies.
    """
    ranked = []
    for record in records:
        value = metric_of(record, policy.metric_key)
        if value is not None:
            ranked.append((value if policy.metric_ascending else -value, record))
    ranked.sort(key=lambda pair: pair[1].recency, reverse=True)
    ranked.sort(key=lambda pair: pair[0])
    return tuple(record for _, record in ranked[: policy.keep_best_n])


def _all_grounds(
    newest_first: list[CheckpointRecord],
    restorable: list[CheckpointRecord],
    protected: set[str],
    policy: GcPolicy,
    now: datetime,
) -> dict[str, tuple[str, ...]]:
    latest_step = restorable[0].step if restorable else 0
    rank = {record.checkpoint_id: position for position, record in enumerate(restorable)}
    grounds: dict[str, tuple[str, ...]] = {}
    for record in newest_first:
        name = record.checkpoint_id
        if record.state is CheckpointState.COMPLETE and name not in rank:
            grounds[name] = ("it cannot be restored: its chain is broken",)
            continue
        # Two checkpoints may share the newest step; only one of them is the newest.
        ceiling = latest_step if name in protected else record.step + 1
        grounds[name] = _grounds(record, policy, ceiling, now, name in protected, rank.get(name, 0))
    return grounds


def _grounds(
    record: CheckpointRecord,
    policy: GcPolicy,
    latest_step: int,
    now: datetime,
    is_best: bool,
    newer: int,
) -> tuple[str, ...]:
    age = (now - record.created_at).total_seconds()
    if record.state is CheckpointState.CREATING:
        if age > policy.abandoned_after_seconds:
            return (f"it was begun {_readable(age)} ago and not completed",)
        return ()
    if record.state is CheckpointState.CORRUPTED:
        return (f"it is corrupted{': ' + record.note if record.note else ''}",)
    if record.state is CheckpointState.DELETED or is_best or record.step >= latest_step:
        return ()
    grounds = []
    most = policy.max_checkpoints_per_run
    if most is not None and newer >= most:
        grounds.append(f"it is not among the newest {most}")
    if policy.max_age_seconds is not None and age > policy.max_age_seconds:
        limit = _readable(policy.max_age_seconds)
        grounds.append(f"it is {_readable(age)} old, the limit is {limit}")
    return tuple(grounds)


def _needed_by(
    kept: set[str], known: Mapping[str, CheckpointRecord], intact: set[str]
) -> dict[str, str]:
    """Id of an ancestor → id of a kept, restorable checkpoint that builds on it."""
    needed: dict[str, str] = {}
    for name in sorted(kept):
        parent_id = known[name].parent_id
        # A checkpoint that is being created on a broken chain cannot be completed, so it needs no ancestors.
        if parent_id is None or parent_id not in intact:
            continue
        for ancestor in lineage(known, parent_id):
            needed.setdefault(ancestor.checkpoint_id, name)
    return needed


def _readable(seconds: float) -> str:
    for unit, size in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
