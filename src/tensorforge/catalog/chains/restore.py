"""Chooses the checkpoint to restore, explains the choice, and estimates the duration. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tensorforge.catalog.chains.chains import Checkpoints, by_id, lineage, restorable_ids
from tensorforge.catalog.chains.records import CheckpointRecord, CheckpointState, RestoreCriteria
from tensorforge.errors import InvalidInputError
from tensorforge.validation import finite_number

COMPLETENESS = 2.0**42
SELF_CONTAINED = 2.0**41
HIGHEST_STEP = 2**40


@dataclass(frozen=True, slots=True)
class SelectionScore:
    """How well a checkpoint meets the criteria. Each term outweighs all terms below it.

    `completeness`: 2^42 if the checkpoint is complete, 0 while it is being created.
    `type_preference`: 2^41 with `prefer_full` if the checkpoint is self-contained.
    `recency`: the step, up to 2^40; a later step means less work to repeat.
    `chain`: 1 / (1 + chain length); a shorter chain is restored faster.
    `refusal`: why the checkpoint does not qualify; the total is then minus infinity.
    """

    completeness: float
    type_preference: float
    recency: float
    chain: float
    refusal: str = ""

    @property
    def total(self) -> float:
        """The sum of the terms; minus infinity for a checkpoint that does not qualify."""
        if self.refusal:
            return -math.inf
        return self.completeness + self.type_preference + self.recency + self.chain


def score_checkpoint(
    checkpoint: CheckpointRecord, criteria: RestoreCriteria, links: int | None = None
) -> SelectionScore:
    """Score one checkpoint. `links` is the length of its chain; with `None` a parent counts as one link."""
    length = links if links is not None else (1 if checkpoint.is_self_contained else 2)
    preferred = criteria.prefer_full and checkpoint.is_self_contained
    return SelectionScore(
        completeness=COMPLETENESS if checkpoint.state is CheckpointState.COMPLETE else 0.0,
        type_preference=SELF_CONTAINED if preferred else 0.0,
        recency=float(min(checkpoint.step, HIGHEST_STEP)),
        chain=1.0 / (1 + length),
        refusal=_refusal(checkpoint, criteria),
    )


def selection_score(
    checkpoint: CheckpointRecord, criteria: RestoreCriteria, links: int | None = None
) -> float:
    """The total of `score_checkpoint`: higher is better, minus infinity does not qualify."""
    return score_checkpoint(checkpoint, criteria, links).total


def _refusal(checkpoint: CheckpointRecord, criteria: RestoreCriteria) -> str:
    if checkpoint.training_run_id != criteria.training_run_id:
        return f"it belongs to run {checkpoint.training_run_id!r}"
    if checkpoint.state in (CheckpointState.CORRUPTED, CheckpointState.DELETED):
        return f"it is {checkpoint.state.value}"
    if criteria.require_complete and checkpoint.state is not CheckpointState.COMPLETE:
        return f"it is {checkpoint.state.value}, and only complete ones qualify"
    if criteria.max_epoch is not None and checkpoint.epoch > criteria.max_epoch:
        return f"its epoch {checkpoint.epoch} is beyond {criteria.max_epoch}"
    if criteria.max_step is not None and checkpoint.step > criteria.max_step:
        return f"its step {checkpoint.step} is beyond {criteria.max_step}"
    return ""


@dataclass(frozen=True, slots=True)
class RestoreCandidate:
    """A checkpoint that could be restored, its score, and the chain that a restore would read."""

    record: CheckpointRecord
    score: SelectionScore
    chain: tuple[CheckpointRecord, ...]
    """The root comes first; empty if the checkpoint does not qualify."""

    @property
    def bytes_to_read(self) -> int:
        """The size of all checkpoints in the chain."""
        return sum(record.size_bytes for record in self.chain)


def rank_candidates(
    checkpoints: Checkpoints, criteria: RestoreCriteria
) -> tuple[RestoreCandidate, ...]:
    """All checkpoints of the run, best first; those that do not qualify come last, with the reason."""
    known = by_id(checkpoints)
    intact = restorable_ids(known)
    found = [
        _candidate(record, criteria, known, intact)
        for record in known.values()
        if record.training_run_id == criteria.training_run_id
    ]
    found.sort(key=lambda each: (each.score.total, each.record.recency), reverse=True)
    return tuple(found)


def _candidate(
    record: CheckpointRecord, criteria: RestoreCriteria, known: Checkpoints, intact: set[str]
) -> RestoreCandidate:
    score = score_checkpoint(record, criteria)
    if score.refusal:
        return RestoreCandidate(record, score, ())
    complete = record.state is CheckpointState.COMPLETE
    if complete and record.checkpoint_id not in intact:
        return RestoreCandidate(record, _refused(score, "its chain is broken"), ())
    if not complete:
        return RestoreCandidate(record, score, ())
    chain = tuple(reversed(lineage(known, record.checkpoint_id)))
    return RestoreCandidate(record, score_checkpoint(record, criteria, len(chain)), chain)


def _refused(score: SelectionScore, reason: str) -> SelectionScore:
    return SelectionScore(
        score.completeness, score.type_preference, score.recency, score.chain, reason
    )


def estimate_restore_time(
    chain: Iterable[CheckpointRecord], base_ms: float, per_checkpoint_ms: float, bytes_per_ms: float
) -> int:
    """Milliseconds to restore a chain: `base + links * per_checkpoint + bytes / rate`, rounded up."""
    records = tuple(chain)
    if not bytes_per_ms > 0:
        raise InvalidInputError(f"bytes_per_ms = {bytes_per_ms}: must be positive")
    for name, value in (("base_ms", base_ms), ("per_checkpoint_ms", per_checkpoint_ms)):
        finite_number(name, value, least=0)
    transfer = sum(record.size_bytes for record in records) / bytes_per_ms
    return math.ceil(base_ms + per_checkpoint_ms * len(records) + transfer)


@dataclass(frozen=True, slots=True)
class RestoreMeasurement:
    """A measured restore: how many checkpoints and bytes it read, and how long it took."""

    links: int
    bytes_read: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RestoreRates:
    """The parameters of `estimate_restore_time`, and the number of restores they were computed from."""

    base_ms: float
    per_checkpoint_ms: float
    bytes_per_ms: float
    measurements: int

    def estimate(self, chain: Iterable[CheckpointRecord]) -> int:
        """Milliseconds to restore this chain at these rates."""
        return estimate_restore_time(chain, self.base_ms, self.per_checkpoint_ms, self.bytes_per_ms)


def rates_from(measurements: Sequence[RestoreMeasurement]) -> RestoreRates | None:
    """Rates from measured restores; `None` if none of them read any bytes.

    The byte rate is the median over the restores with the shortest chain. The additional time of longer chains
    gives the time per checkpoint. Fixed costs of a restore are part of the byte rate, so the base is 0.
    """
    usable = [m for m in measurements if m.bytes_read > 0 and m.seconds > 0 and m.links > 0]
    if not usable:
        return None
    fewest = min(m.links for m in usable)
    rate = statistics.median(m.bytes_read / (m.seconds * 1e3) for m in usable if m.links == fewest)
    longer = [
        (m.seconds * 1e3 - m.bytes_read / rate) / (m.links - fewest)
        for m in usable
        if m.links > fewest
    ]
    per_link = max(0.0, statistics.median(longer)) if longer else 0.0
    return RestoreRates(0.0, per_link, rate, len(usable))
