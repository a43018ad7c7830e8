"""What the journal holds: each decision as an entry, and the state that the entries add up to.

`replay` folds the entries in order; a coordinator that starts on a journal begins with its result. The
rescale history that people read is the same data.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypeAlias

import msgspec

from tensorforge.cluster.workers import WorkerId
from tensorforge.errors import EncodingError

HISTORY = 200
"""How many rescales are kept for people to look at."""


class Seat(msgspec.Struct, frozen=True):
    """One member: who, and which process of that name (`process`: its `ProcessIdentity` as text)."""

    worker: WorkerId
    incarnation: str
    pid: str | None = None
    process: str | None = None


class Entry(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """One line of the journal."""


class Decided(Entry, frozen=True, kw_only=True):
    """A new generation: its members in order of rank, and why."""

    generation: int
    old_generation: int
    seats: tuple[Seat, ...]
    type: str
    reason: str
    urgent: bool
    paused: bool
    added: tuple[str, ...] = ()
    removed: Annotated[dict[str, str], "worker id → why it went"] = {}
    target_version: int = 0
    old_size: int = 0
    detection_ms: float = 0.0
    decided_at: str = ""


class WasFormed(Entry, frozen=True, kw_only=True):
    """Every member of the generation has formed: training goes on."""

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


class TargetSet(Entry, frozen=True, kw_only=True):
    """How many workers are wanted from now on."""

    workers: int
    by: str


class RunEnded(Entry, frozen=True, kw_only=True):
    """The run is over: `outcome` is completed, aborted or stopped."""

    outcome: str
    reason: str
    emergency: bool = False


class RunResumed(Entry, frozen=True, kw_only=True):
    """A run that had ended goes on with new workers; its generations are not used again."""

    reason: str


class RescaleRecord(msgspec.Struct, kw_only=True):
    """One rescale, explained: who, why, how long each part took, what moved.

    Times are milliseconds: `detection` from the evidence to the notice, `decision` until it was durable
    and announced, `barrier` until everybody had stopped, `forming` until everybody had formed and healed,
    `first_commit` until the next committed step. `None`: not reached (yet). `target_version` is that of the
    number of workers that was wanted at the decision; a number of a later version knows of those who went.
    """

    generation: int
    type: str
    reason: str
    urgent: bool
    paused: bool
    added: tuple[str, ...]
    removed: dict[str, str]
    old_size: int
    new_size: int
    target_version: int = 0
    decided_at: str = ""
    detection_ms: float = 0.0
    decision_ms: float | None = None
    barrier_ms: float | None = None
    forming_ms: float | None = None
    first_commit_ms: float | None = None
    moved: dict[str, int] = {}

    @property
    def total_ms(self) -> float | None:
        """From the evidence to the first committed step, if it came that far."""
        parts = (self.decision_ms, self.barrier_ms, self.forming_ms, self.first_commit_ms)
        if any(part is None for part in parts):
            return None
        return self.detection_ms + sum(part for part in parts if part is not None)

    @classmethod
    def opened_by(cls, entry: Decided) -> RescaleRecord:
        """The record as it starts, when the generation is decided."""
        return cls(
            generation=entry.generation,
            type=entry.type,
            reason=entry.reason,
            urgent=entry.urgent,
            paused=entry.paused,
            added=entry.added,
            removed=entry.removed,
            old_size=entry.old_size,
            new_size=len(entry.seats),
            target_version=entry.target_version,
            decided_at=entry.decided_at,
            detection_ms=entry.detection_ms,
        )


class OpenGroup(msgspec.Struct, frozen=True):
    """A generation whose members may be training, for all that the journal says."""

    generation: int
    seats: tuple[Seat, ...]


class DurableState(msgspec.Struct, kw_only=True):
    """What the entries add up to: all that a restarted coordinator knows."""

    generation: int = 0
    seats: tuple[Seat, ...] = ()
    paused: bool = False
    formed_generation: int = 0
    formed_seats: tuple[Seat, ...] = ()
    open_groups: tuple[OpenGroup, ...] = ()
    desired_workers: int | None = None
    target_version: int = 0
    target_by: str = ""
    committed: WasCommitted | None = None
    ended: RunEnded | None = None
    urgent: bool = False
    history: list[RescaleRecord] = []


class Snapshot(Entry, frozen=True, kw_only=True):
    """What all earlier entries add up to, in their place."""

    state: DurableState


AnyEntry: TypeAlias = (
    Decided | WasFormed | WasCommitted | TargetSet | RunEnded | RunResumed | Snapshot
)


def replay(entries: Iterable[Entry]) -> DurableState:
    """Fold the entries, oldest first."""
    state = DurableState(history=[])
    for entry in entries:
        state = follow(state, entry)
    return state


def follow(state: DurableState, entry: Entry) -> DurableState:
    """What `state` becomes with one more entry; `state` itself may change."""
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
        state.history = [*state.history[-(HISTORY - 1) :], RescaleRecord.opened_by(entry)]
    elif isinstance(entry, WasFormed):
        state.formed_generation = entry.generation
        state.formed_seats = state.seats
        state.open_groups = (OpenGroup(entry.generation, state.seats),)
        complete(state.history, entry)
    elif isinstance(entry, WasCommitted):
        state.committed = entry
        complete(state.history, entry)
    elif isinstance(entry, TargetSet):
        state.desired_workers = entry.workers
        state.target_version += 1
        state.target_by = entry.by
    elif isinstance(entry, RunEnded):
        state.ended = entry
    elif isinstance(entry, RunResumed):
        state.ended = None
        state.seats = ()
        state.formed_seats = ()
        state.open_groups = ()
        state.paused = False


def _succeed(groups: tuple[OpenGroup, ...], new: OpenGroup) -> tuple[OpenGroup, ...]:
    """The groups that may be training once `new` was decided.

    It would not have been decided beside a group that it shares no member with, so those are over. A group that
    contains all of its members ends with it, and need not be kept.
    """
    members = {(seat.worker.id, seat.incarnation) for seat in new.seats}

    def matters(group: OpenGroup) -> bool:
        shared = members & {(seat.worker.id, seat.incarnation) for seat in group.seats}
        return bool(shared) and shared != members

    return (*filter(matters, groups), new)


def complete(history: list[RescaleRecord], entry: WasFormed | WasCommitted) -> None:
    """Fill the figures that `entry` brings into the record of its generation."""
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
    """The inverse of `entry_to_json`; anything else is an `EncodingError`."""
    try:
        return _decoder.decode(text)
    except msgspec.DecodeError as error:
        raise EncodingError(f"not an entry of the journal: {error}") from error
