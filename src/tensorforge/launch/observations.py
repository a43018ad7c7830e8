"""From what the coordinator shows to what happened: the difference of two views as events."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.elastic.coordinator.machine.journal_records import RescaleRecord
from tensorforge.elastic.protocol.cluster_view import ClusterView, WorkerView
from tensorforge.launch.supervisor.events import (
    Event,
    GenerationFormed,
    TargetChanged,
    TrainingAborted,
    TrainingFinished,
    WorkerJoined,
    WorkerLost,
    WorkerReleased,
)

_PHASES = ("detection", "decision", "barrier", "forming", "first_commit")
_SURPLUS = re.compile(r" wants \d+ workers?$")
_LATENESS = timedelta(minutes=1)
COMPLETED = "completed"
LAUNCHER = "the launcher"
"""By whom the launcher's own wishes are."""


@dataclass(frozen=True, slots=True)
class TargetWish:
    """So many workers, unless somebody has set a number since the version `expected` (`None`: in any case)."""

    workers: int
    expected: int | None


class Observer:
    """Follows one run: views in, events out.

    Views come from a stream and as answers to the launcher's own wishes, so an older one may arrive after
    a newer one; it is passed over. The number of workers that is wanted is not compared while a wish of the
    launcher's may still be followed: that is no news, and before it the coordinator shows an older number.

    One wish is under way at a time, and the newest one waits for its answer. If somebody else's number is
    seen first, what waits is given up: sent on, it would name the version of that number and overwrite it.
    """

    def __init__(self) -> None:
        self._seen: ClusterView | None = None
        self._target: int | None = None
        self._others_version = 0
        self._under_way: TargetWish | None = None
        self._is_waiting = False

    def asked(self, workers: int) -> None:
        """The launcher wants so many workers; `next_wish` tells when to say so."""
        self._target, self._is_waiting = workers, True

    def next_wish(self) -> TargetWish | None:
        """What to ask for now, if anything; a call of `look` with `answers` will tell of the end."""
        if self._under_way is not None or not self._is_waiting or self._target is None:
            return None
        self._under_way, self._is_waiting = TargetWish(self._target, self._version), False
        return self._under_way

    def look(self, view: ClusterView | None, *, answers: bool = False) -> Iterator[Event]:
        """What is new. `answers`: this is what held after a wish was heard, followed or not."""
        old = self._seen
        if view is not None and not self._is_older(view):
            self._seen = view
            self._heed_others(view)
        if answers:
            self._answered()
        yield from self._another_target()
        if self._seen is not None and self._seen is not old:
            yield from changes(old, self._seen, others_version=self._others_version)

    def _heed_others(self, view: ClusterView) -> None:
        # The launcher's number is followed only if it knew of all others, so the newest one tells.
        if view.target_by != LAUNCHER and view.target_version != self._others_version:
            self._others_version = view.target_version
            self._is_waiting = False

    def _answered(self) -> None:
        wish, self._under_way = self._under_way, None
        if wish is not None and wish.expected == self._version:
            self._is_waiting = False  # it was refused, and not because of somebody else's number

    @property
    def _version(self) -> int | None:
        return None if self._seen is None else self._seen.target_version

    @property
    def _has_wish(self) -> bool:
        """Whether the number that the launcher wants is not the coordinator's yet, but may come to be."""
        wish = self._under_way
        if wish is None or (wish.expected is not None and wish.expected < self._others_version):
            return self._is_waiting
        return True

    def _is_older(self, view: ClusterView) -> bool:
        seen = self._seen
        if seen is None or seen.taken_at is None or view.taken_at is None:
            return False
        # Much older: the clock was set back, or a coordinator elsewhere took over.
        return timedelta(0) < seen.taken_at - view.taken_at < _LATENESS

    def _another_target(self) -> Iterator[Event]:
        """A target comes before the departures that follow from it."""
        if self._seen is None or self._has_wish:
            return
        wanted = self._seen.desired_workers
        if wanted is not None and wanted != self._target:
            self._target = wanted
            yield TargetChanged(wanted)


def changes(
    old: ClusterView | None, new: ClusterView, *, others_version: int = 0
) -> Iterator[Event]:
    """What happened between two views of one run; `None` stands for nothing seen yet.

    `others_version` is that of the last number of workers that somebody but the launcher has asked for.
    """
    # Whom the number knows of comes first: of those who leave beyond that, one fewer is wanted.
    yield from sorted(
        _departures(old, new, others_version),
        key=lambda e: not (isinstance(e, WorkerReleased) and e.surplus),
    )
    yield from _arrivals(old, new)
    yield from _formations(old, new)
    yield from _progress(old, new)
    if new.ended is not None and (old is None or old.ended is None):
        if new.ended.outcome == COMPLETED:
            yield TrainingFinished(new.ended.reason)
        else:
            yield TrainingAborted(f"the run was {new.ended.outcome}: {new.ended.reason}")


def _everybody(view: ClusterView | None) -> dict[str, WorkerView]:
    return {} if view is None else {worker.id: worker for worker in (*view.workers, *view.waiting)}


def _departures(old: ClusterView | None, new: ClusterView, others_version: int) -> Iterator[Event]:
    before, after = _everybody(old), _everybody(new)
    if new.ended is not None:
        return
    for name, worker in after.items():
        known = before.get(name)
        if worker.leave_reason is not None and (known is None or known.leave_reason is None):
            yield _released(name, worker.leave_reason, new, others_version)
    for name, worker in before.items():
        if name in after and after[name].incarnation == worker.incarnation:
            continue
        record = _removal_of(name, new)
        reason = None if record is None else record.removed[name]
        if worker.leave_reason is not None:
            continue
        if reason is not None and not reason.startswith(f"{name} failed"):
            yield _released(name, reason, new, others_version)
        else:
            yield WorkerLost(name, _without_name(reason, name))
    for name, reason in _passed_unseen(old, new).items():
        if name not in before and name not in after and not reason.startswith(f"{name} failed"):
            yield _released(name, reason, new, others_version)


def _passed_unseen(old: ClusterView | None, new: ClusterView) -> dict[str, str]:
    """Whoever was removed since the old view, with the reason: some came and went between the two."""
    if old is None:
        return {}
    fresh = [record.removed for record in new.rescales if record.generation > old.generation]
    return {name: reason for removed in fresh for name, reason in removed.items()}


def _released(name: str, reason: str, view: ClusterView, others_version: int) -> WorkerReleased:
    record = _removal_of(name, view)
    was_known = record is not None and record.target_version < others_version
    return WorkerReleased(name, reason, surplus=was_known or bool(_SURPLUS.search(reason)))


def _removal_of(name: str, view: ClusterView) -> RescaleRecord | None:
    return next((record for record in reversed(view.rescales) if name in record.removed), None)


def _without_name(reason: str | None, name: str) -> str:
    return (reason or "it is gone").removeprefix(f"{name} failed: ")


def _arrivals(old: ClusterView | None, new: ClusterView) -> Iterator[Event]:
    before = _everybody(old)
    for name, worker in _everybody(new).items():
        known = before.get(name)
        is_new = known is None or known.incarnation != worker.incarnation
        if is_new and worker.is_connected:
            yield WorkerJoined(name)


def _formations(old: ClusterView | None, new: ClusterView) -> Iterator[Event]:
    if new.formed_generation == 0 or _is_history(old, new):
        return
    record = _record_of(new, new.formed_generation)
    known = None if old is None else _record_of(old, new.formed_generation)
    is_new = old is None or new.formed_generation != old.formed_generation
    if not is_new and (record is None or _phases(record) == _phases(known)):
        return
    members = tuple(worker.id for worker in new.workers if worker.rank >= 0)
    reason, size = ("", None) if record is None else (record.reason, record.new_size)
    yield GenerationFormed(new.formed_generation, members, reason, _phases(record), size)


def _is_history(old: ClusterView | None, new: ClusterView) -> bool:
    """What a journal tells of an earlier launch, before anybody has come."""
    return old is None and not any(worker.is_connected for worker in new.workers)


def _record_of(view: ClusterView, generation: int) -> RescaleRecord | None:
    return next((r for r in reversed(view.rescales) if r.generation == generation), None)


def _phases(record: RescaleRecord | None) -> dict[str, float]:
    if record is None:
        return {}
    times = {phase: getattr(record, f"{phase}_ms") for phase in _PHASES}
    return {phase.replace("_", " "): time for phase, time in times.items() if time is not None}


def _progress(old: ClusterView | None, new: ClusterView) -> Iterator[Event]:
    if new.state.step < 0 or _is_history(old, new):
        return
    if old is not None and old.state.step >= new.state.step:
        return
    losses = [worker.metrics["loss"] for worker in new.workers if "loss" in worker.metrics]
    yield CommittedStep(
        step=new.state.step,
        epoch=new.state.epoch,
        learning_rate=new.state.learning_rate,
        metrics={"loss": losses[0]} if losses else {},
    )
