"""From views of the cluster to events: what the coordinator's newest view says that the one before did not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.elastic.protocol.cluster_view import ClusterView, WorkerView
from tensorforge.elastic.protocol.reasons import (
    Departure,
    DepartureKind,
    Requester,
    RunOutcome,
)
from tensorforge.elastic.protocol.rescale_record import RescaleRecord
from tensorforge.launch.supervisor.events import (
    Event,
    GenerationFormed,
    TargetChanged,
    TrainingAborted,
    TrainingFinished,
    TrainingStopped,
    WorkerJoined,
    WorkerLost,
    WorkerReleased,
)

_LATENESS = timedelta(minutes=1)
"""A view that is older than the newest one by less than this was overtaken on its way."""
_LOST = (DepartureKind.FAILED, DepartureKind.UNKNOWN)
"""Departures that nobody asked for, as far as is known; the exit of the process tells the rest."""


@dataclass(frozen=True, slots=True)
class TargetRequest:
    """Ask for so many workers; refused if the target was set since the version `expected`."""

    workers: int
    expected: int | None


class Observer:
    """Follows one run: views go in, events come out.

    Views come from a stream and as answers to the launcher's requests. An older view that arrives after a newer
    one is ignored. While a request of the launcher may still be granted, the target in a view is not compared
    with the launcher's: the view may have been taken before the request was granted.

    One request is under way at a time; the newest target waits for its answer. If the target of an operator is
    seen first, the waiting one is dropped: its request would name the version of the operator's target and
    replace it.
    """

    def __init__(self) -> None:
        self._seen: ClusterView | None = None
        self._target: int | None = None
        self._operators_version = 0
        self._under_way: TargetRequest | None = None
        self._is_waiting = False

    def asked(self, workers: int) -> None:
        """The launcher wants so many workers; `next_request` says when to ask the coordinator."""
        self._target, self._is_waiting = workers, True

    def next_request(self) -> TargetRequest | None:
        """The request to send now, if any. After its answer, call `look` with `answers`."""
        if self._under_way is not None or not self._is_waiting or self._target is None:
            return None
        self._under_way, self._is_waiting = TargetRequest(self._target, self._version), False
        return self._under_way

    def look(self, view: ClusterView | None, *, answers: bool = False) -> Iterator[Event]:
        """The events since the last view. `answers`: the view was taken after a request was answered."""
        old = self._seen
        if view is not None and not self._is_older(view):
            self._seen = view
            self._follow_operator(view)
        if answers:
            self._answered()
        yield from self._another_target()
        if self._seen is not None and self._seen is not old:
            yield from changes(old, self._seen, operators_version=self._operators_version)

    def _follow_operator(self, view: ClusterView) -> None:
        # A request of the launcher is granted only if it names the newest version, so the newest target tells.
        is_operators = view.target_requester is not Requester.LAUNCHER
        if is_operators and view.target_version != self._operators_version:
            self._operators_version = view.target_version
            self._is_waiting = False

    def _answered(self) -> None:
        request, self._under_way = self._under_way, None
        if request is not None and request.expected == self._version:
            self._is_waiting = False  # The number itself was refused, not its version.

    @property
    def _version(self) -> int | None:
        return None if self._seen is None else self._seen.target_version

    @property
    def _may_be_granted(self) -> bool:
        """Whether the launcher's target is not the coordinator's yet, but may still become it."""
        request = self._under_way
        if request is None:
            return self._is_waiting
        is_refused = request.expected is not None and request.expected < self._operators_version
        return self._is_waiting or not is_refused

    def _is_older(self, view: ClusterView) -> bool:
        seen = self._seen
        if seen is None or seen.taken_at is None or view.taken_at is None:
            return False
        # Much older: the clock was set back, or a coordinator on another machine took over.
        return timedelta(0) < seen.taken_at - view.taken_at < _LATENESS

    def _another_target(self) -> Iterator[Event]:
        """A new target comes before the departures that follow from it."""
        if self._seen is None or self._may_be_granted:
            return
        wanted = self._seen.desired_workers
        if wanted is not None and wanted != self._target:
            self._target = wanted
            yield TargetChanged(wanted)


def changes(
    old: ClusterView | None, new: ClusterView, *, operators_version: int = 0
) -> Iterator[Event]:
    """What happened between two views of one run; `None` stands for no view yet.

    `operators_version` is the version of the newest target that an operator has set.
    """
    # Departures that the target already counts come first: each of the others lowers the target.
    yield from sorted(
        _departures(old, new, operators_version),
        key=lambda e: not (isinstance(e, WorkerReleased) and e.surplus),
    )
    yield from _arrivals(old, new)
    yield from _formations(old, new)
    yield from _progress(old, new)
    if new.ended is not None and (old is None or old.ended is None):
        if new.ended.outcome is RunOutcome.COMPLETED:
            yield TrainingFinished(new.ended.reason)
        elif new.ended.outcome is RunOutcome.STOPPED:
            yield TrainingStopped(new.ended.reason)
        else:
            yield TrainingAborted(f"the run was {new.ended.outcome}: {new.ended.reason}")


def _all_workers(view: ClusterView | None) -> dict[str, WorkerView]:
    return {} if view is None else {worker.id: worker for worker in (*view.workers, *view.waiting)}


def _departures(
    old: ClusterView | None, new: ClusterView, operators_version: int
) -> Iterator[Event]:
    before, after = _all_workers(old), _all_workers(new)
    if new.ended is not None:
        return
    for name, worker in after.items():
        known = before.get(name)
        if worker.leave_reason is not None and (known is None or known.leave_reason is None):
            yield _released(worker.leave_reason, operators_version)
    for name, worker in before.items():
        is_same = name in after and after[name].incarnation == worker.incarnation
        if is_same or worker.leave_reason is not None:
            continue
        departure = _departure_of(name, new)
        if departure is None or departure.kind in _LOST:
            yield WorkerLost(name, "it is gone" if departure is None else departure.detail)
        else:
            yield _released(departure, operators_version)
    for name, departure in _departed_between(old, new).items():
        if name not in before and name not in after and departure.kind not in _LOST:
            yield _released(departure, operators_version)


def _departed_between(old: ClusterView | None, new: ClusterView) -> dict[str, Departure]:
    """Everybody who was removed since the old view; some joined after it and are in neither view."""
    if old is None:
        return {}
    fresh = [record.removed for record in new.rescales if record.generation > old.generation]
    return {name: departure for removed in fresh for name, departure in removed.items()}


def _released(departure: Departure, operators_version: int) -> WorkerReleased:
    is_surplus = departure.kind is DepartureKind.SURPLUS
    is_counted = is_surplus or departure.target_version < operators_version
    return WorkerReleased(departure.worker, str(departure), surplus=is_counted)


def _departure_of(name: str, view: ClusterView) -> Departure | None:
    return next((r.removed[name] for r in reversed(view.rescales) if name in r.removed), None)


def _arrivals(old: ClusterView | None, new: ClusterView) -> Iterator[Event]:
    before = _all_workers(old)
    for name, worker in _all_workers(new).items():
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
    """Whether the view shows only what the journal kept of an earlier launch: nobody is connected yet."""
    return old is None and not any(worker.is_connected for worker in new.workers)


def _record_of(view: ClusterView, generation: int) -> RescaleRecord | None:
    return next((r for r in reversed(view.rescales) if r.generation == generation), None)


def _phases(record: RescaleRecord | None) -> dict[str, float]:
    times = {} if record is None else record.milliseconds
    return {phase.label: time for phase, time in times.items()}


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
        metrics={"loss": math.nan if losses[0] is None else losses[0]} if losses else {},
    )
