"""Retention: from the records of a run to what is kept and what goes, each with its reasons. Pure.

The order of the rules:

1. What is being created is left alone until it counts as abandoned.
2. What cannot be restored goes: it is corrupted, or a part of its chain is missing.
3. Of the rest, what is too old, or beyond the newest so many, may go ...
4. ... unless it is the newest restorable one, the newest verified one, or among the best.
5. Whatever a kept checkpoint builds on is kept too.
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
    """The fate of one checkpoint and why."""

    record: CheckpointRecord
    keep: bool
    reasons: tuple[str, ...]

    @property
    def checkpoint_id(self) -> str:
        """The id of the checkpoint that was judged."""
        return self.record.checkpoint_id


def is_gc_eligible(
    checkpoint: CheckpointRecord,
    policy: GcPolicy,
    latest_step: int,
    now: datetime,
    is_best: bool,
    newer: int = 0,
) -> bool:
    """Whether the policy lets a single checkpoint go, its chain aside.

    `latest_step` is the step of the newest restorable checkpoint of the run, which never goes;
    `is_best` says that this one is among the best; `newer` is how many restorable ones are newer.
    """
    return bool(_grounds(checkpoint, policy, latest_step, now, is_best, newer))


def decide_retention(
    records: Iterable[CheckpointRecord], policy: GcPolicy, now: datetime
) -> tuple[RetentionDecision, ...]:
    """Judge all records of one run, newest first; those already deleted are left out.

    After the deletions every kept incremental checkpoint still has its whole chain.
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
        reasons.append("it is being written" if creating else "within age and number")
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
    for rank, record in enumerate(best_by_metric(restorable, policy), 1):
        value = record.metrics[policy.metric_key]
        text = f"number {rank} of the best {policy.keep_best_n} by {policy.metric_key} ({value:g})"
        reasons.setdefault(record.checkpoint_id, []).append(text)
    return {name: tuple(texts) for name, texts in reasons.items()}


def best_by_metric(
    records: Iterable[CheckpointRecord], policy: GcPolicy
) -> tuple[CheckpointRecord, ...]:
    """The best `keep_best_n` by the policy's metric, best first; of equals, the newer.

    A missing metric or NaN never qualifies.
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
            return (f"it was begun {_readable(age)} ago and never completed",)
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
    """Ancestor → a kept checkpoint that builds on it, for the restorable among the kept."""
    needed: dict[str, str] = {}
    for name in sorted(kept):
        parent_id = known[name].parent_id
        # One that is being created on a broken chain will not be completed: it needs nothing.
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
