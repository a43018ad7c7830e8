"""The entries of the journal, and the state that they add up to.

Each decision of the coordinator is one entry. `replay` folds the entries in order; a coordinator that starts on
a journal begins with the result. The history of rescales that people read is part of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec

from tensorforge.cluster.goal import Goal
from tensorforge.cluster.workers import WorkerId
from tensorforge.elastic.protocol.messages import Ended, Finish
from tensorforge.elastic.protocol.reasons import Departure, DepartureKind, Requester, RunOutcome
from tensorforge.elastic.protocol.rescale_record import RescaleRecord
from tensorforge.errors import EncodingError

HISTORY = 200
"""How many rescales the history keeps."""


class Seat(msgspec.Struct, frozen=True):
    """A member of a generation: the worker, and which process of that name it is.

    `process` is its `ProcessIdentity` as text; entries of older journals have none.
    """

    worker: WorkerId
    incarnation: str
    pid: str | None = None
    process: str | None = None


class Entry(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """One line of the journal."""


class Decided(Entry, frozen=True, kw_only=True):
    """A generation was decided: its members in order of rank, why, and why each removed worker went."""

    generation: int
    old_generation: int
    seats: tuple[Seat, ...]
    type: str
    reason: str
    urgent: bool
    paused: bool
    added: tuple[str, ...] = ()
    removed: dict[str, Departure] = {}
    old_size: int = 0
    detection_ms: float = 0.0
    decided_at: str = ""


class WasFormed(Entry, frozen=True, kw_only=True):
    """Every member of the generation has formed its group: training goes on."""

    generation: int
    decision_ms: float = 0.0
    barrier_ms: float = 0.0
    forming_ms: float = 0.0
    moved: dict[str, int] = {}


class WasCommitted(Entry, frozen=True, kw_only=True):
    """The first step of the generation was committed."""

    generation: int
    epoch: int
    step: int
    learning_rate: float
    samples: int
    global_batch_size: int
    first_commit_ms: float = 0.0


class WasFinished(Entry, frozen=True, kw_only=True):
    """A member of the formed generation has said that training is over on it."""

    seat: Seat
    generation: int
    committed_step: int
    epoch: int
    reason: str = ""

    @property
    def message(self) -> Finish:
        """What the member said."""
        return Finish(
            incarnation=self.seat.incarnation,
            generation=self.generation,
            committed_step=self.committed_step,
            epoch=self.epoch,
            reason=self.reason,
        )


class TermsFixed(Entry, frozen=True, kw_only=True):
    """The facts that are the same on all workers of this run from now on, and its goal."""

    terms: dict[str, str]
    goal: Goal | None = None


class TargetSet(Entry, frozen=True, kw_only=True):
    """So many workers are wanted from now on."""

    workers: int
    by: str
    requester: Requester = Requester.OPERATOR


class RunEnded(Entry, frozen=True, kw_only=True):
    """The run is over. `emergency`: the member called `saver` was asked to save a checkpoint."""

    outcome: RunOutcome
    reason: str
    emergency: bool = False
    saver: str | None = None

    @property
    def message(self) -> Ended:
        """What workers and clients are told."""
        return Ended(
            outcome=self.outcome, reason=self.reason, emergency=self.emergency, saver=self.saver
        )


class RunResumed(Entry, frozen=True, kw_only=True):
    """A run that had ended goes on with new workers; its generations are not used again."""

    reason: str


class OpenGroup(msgspec.Struct, frozen=True):
    """A generation whose members may be training, as far as the journal tells."""

    generation: int
    seats: tuple[Seat, ...]


class DurableState(msgspec.Struct, kw_only=True):
    """What the entries add up to: all that a restarted coordinator knows.

    `seats` are the members of `generation`; `formed_seats` are those of `formed_generation`, the last one that
    every member formed. `terms` are set with the first generation. `committed` is the first committed step of
    the newest generation that has one.
    """

    generation: int = 0
    seats: tuple[Seat, ...] = ()
    paused: bool = False
    formed_generation: int = 0
    formed_seats: tuple[Seat, ...] = ()
    open_groups: tuple[OpenGroup, ...] = ()
    desired_workers: int | None = None
    target_version: int = 0
    target_by: str = ""
    target_requester: Requester = Requester.OPERATOR
    terms: TermsFixed | None = None
    finishes: tuple[WasFinished, ...] = ()
    committed: WasCommitted | None = None
    ended: RunEnded | None = None
    urgent: bool = False
    history: list[RescaleRecord] = []


class Snapshot(Entry, frozen=True, kw_only=True):
    """What all earlier entries add up to. It replaces them."""

    state: DurableState


AnyEntry: TypeAlias = (
    Decided
    | WasFormed
    | WasCommitted
    | WasFinished
    | TermsFixed
    | TargetSet
    | RunEnded
    | RunResumed
    | Snapshot
)


def replay(entries: Iterable[Entry]) -> DurableState:
    """Fold the entries, oldest first, into one state."""
    state = DurableState(history=[])
    for entry in entries:
        state = follow(state, entry)
    return state


def follow(state: DurableState, entry: Entry) -> DurableState:
    """Return the state after one more entry; `state` itself may be changed."""
    if isinstance(entry, Snapshot):
        return entry.state
    _apply(state, entry)
    return state


def _apply(state: DurableState, entry: Entry) -> None:
    if isinstance(entry, Decided):
        state.generation = entry.generation
        state.seats = entry.seats
        state.paused = entry.paused
        state.urgent = entry.urgent
        if not entry.paused:
            state.open_groups = _succeed(
                state.open_groups, OpenGroup(entry.generation, entry.seats)
            )
        state.history = with_decision(state.history, entry)
    elif isinstance(entry, WasFormed):
        state.formed_generation = entry.generation
        state.formed_seats = state.seats
        state.finishes = ()
        state.open_groups = (OpenGroup(entry.generation, state.seats),)
        complete(state.history, entry)
    elif isinstance(entry, WasCommitted):
        state.committed = entry
        complete(state.history, entry)
    elif isinstance(entry, TargetSet):
        state.desired_workers = entry.workers
        state.target_version += 1
        state.target_by, state.target_requester = entry.by, entry.requester
    elif isinstance(entry, WasFinished):
        state.finishes = (*state.finishes, entry)
    elif isinstance(entry, TermsFixed):
        state.terms = entry
    elif isinstance(entry, RunEnded):
        state.ended = entry
    elif isinstance(entry, RunResumed):
        state.ended = None
        state.seats = ()
        state.formed_seats = ()
        state.open_groups = ()
        state.paused = False
        state.terms = None
        state.finishes = ()


def _succeed(groups: tuple[OpenGroup, ...], new: OpenGroup) -> tuple[OpenGroup, ...]:
    """The groups that may be training once `new` is decided.

    `new` would not have been decided beside a group that shares no member with it, so such groups are over. A
    group that contains all members of `new` ends when they stop for it, so it need not be kept either.
    """
    members = {(seat.worker.id, seat.incarnation) for seat in new.seats}

    def matters(group: OpenGroup) -> bool:
        shared = members & {(seat.worker.id, seat.incarnation) for seat in group.seats}
        return bool(shared) and shared != members

    return (*filter(matters, groups), new)


def with_decision(history: list[RescaleRecord], entry: Decided) -> list[RescaleRecord]:
    """The history with one more rescale, which this decision begins; the oldest one may go."""
    record = RescaleRecord(
        generation=entry.generation,
        type=entry.type,
        reason=entry.reason,
        urgent=entry.urgent,
        paused=entry.paused,
        added=entry.added,
        removed=entry.removed,
        old_size=entry.old_size,
        new_size=len(entry.seats),
        decided_at=entry.decided_at,
        detection_ms=entry.detection_ms,
    )
    return [*history[-(HISTORY - 1) :], record]


def complete(history: list[RescaleRecord], entry: WasFormed | WasCommitted) -> None:
    """Write the figures of `entry` into the record of its generation."""
    for record in reversed(history):
        if record.generation != entry.generation:
            continue
        if isinstance(entry, WasFormed):
            record.decision_ms = entry.decision_ms
            record.barrier_ms = entry.barrier_ms
            record.forming_ms = entry.forming_ms
            record.moved = entry.moved
        else:
            record.first_commit_ms = entry.first_commit_ms
        return


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEntry] = msgspec.json.Decoder(AnyEntry)


def entry_to_json(entry: Entry) -> str:
    """The entry as one line of JSON."""
    return _encoder.encode(entry).decode()


def entry_from_json(text: str) -> Entry:
    """The inverse of `entry_to_json`; anything else is an `EncodingError`.

    Entries of the format without kinds of departures are understood, too.
    """
    try:
        try:
            return _decoder.decode(text)
        except msgspec.ValidationError:
            entry: Entry = msgspec.convert(_with_kinds(msgspec.json.decode(text)), AnyEntry)
            return entry
    except msgspec.DecodeError as error:
        raise EncodingError(f"not an entry of the journal: {error}") from error


def _with_kinds(entry: Any) -> Any:
    """Give a kind to the departures of an entry in which they are sentences."""
    if isinstance(entry, dict):
        state = entry.get("state")
        records = state.get("history", []) if isinstance(state, dict) else [entry]
        for record in records:
            removed = record.get("removed") if isinstance(record, dict) else None
            for name, why in removed.items() if isinstance(removed, dict) else ():
                if isinstance(why, str):
                    record["removed"][name] = Departure(
                        kind=DepartureKind.UNKNOWN, worker=name, detail=why
                    )
    return entry
