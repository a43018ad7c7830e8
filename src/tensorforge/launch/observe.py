"""From what the coordinator shows to what happened: the difference of two views as events."""

from __future__ import annotations

from collections.abc import Iterator

from tensorforge.elastic.records import RescaleRecord
from tensorforge.elastic.view import ClusterView, WorkerView
from tensorforge.launch.events import (
    Event,
    GenerationFormed,
    StepCommitted,
    TargetChanged,
    TrainingAborted,
    TrainingFinished,
    WorkerJoined,
    WorkerLost,
    WorkerReleased,
)

_PHASES = ("detection", "decision", "barrier", "forming", "first_commit")
COMPLETED = "completed"


def changes(old: ClusterView | None, new: ClusterView) -> Iterator[Event]:
    """What happened between two views of one run; `None` stands for nothing seen yet.

    A new target comes before the departures that follow from it. The first view's target is no change:
    the launcher has just set it, or is about to.
    """
    if old is not None and new.desired_workers not in (None, old.desired_workers):
        yield TargetChanged(new.desired_workers or 0)
    yield from _departures(old, new)
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


def _departures(old: ClusterView | None, new: ClusterView) -> Iterator[Event]:
    before, after = _everybody(old), _everybody(new)
    if new.ended is not None:
        return
    for name, worker in after.items():
        known = before.get(name)
        if worker.leave_reason is not None and (known is None or known.leave_reason is None):
            yield WorkerReleased(name, worker.leave_reason)
    for name, worker in before.items():
        if name in after and after[name].incarnation == worker.incarnation:
            continue
        reason = _why_it_went(name, new)
        if worker.leave_reason is not None:
            continue
        if reason is not None and not reason.startswith(f"{name} failed"):
            yield WorkerReleased(name, reason)
        else:
            yield WorkerLost(name, _without_name(reason, name))


def _why_it_went(name: str, view: ClusterView) -> str | None:
    reasons = (record.removed.get(name) for record in reversed(view.rescales))
    return next((reason for reason in reasons if reason is not None), None)


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
    yield StepCommitted(
        new.state.step,
        epoch=new.state.epoch,
        loss=losses[0] if losses else None,
        learning_rate=new.state.learning_rate,
    )
