"""What travels between a worker and the coordinator, as JSON that is checked on arrival.

A worker opens one stream: `Hello` first, then any of the messages in `FROM_WORKER`; the coordinator
answers with those in `FROM_COORDINATOR`. Every message of a worker carries its incarnation (which
process this is) and, where it matters, the generation it speaks about. Unknown kinds, unknown fields,
wrong types and oversized values are refused by the decoder, before any logic sees them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, TypeAlias

import msgspec

from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WorkerId
from tensorforge.elastic.protocol.reasons import RunOutcome
from tensorforge.errors import EncodingError

PROTOCOL = 1
"""Both sides must speak the same version."""

MAX_UPLOAD_BYTES = 1 << 20
"""The largest message that a worker may send."""

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=20_000)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Step: TypeAlias = Annotated[int, msgspec.Meta(ge=-1)]
Attributes: TypeAlias = Annotated[
    dict[Name, Annotated[str, msgspec.Meta(max_length=4_000)]], msgspec.Meta(max_length=64)
]
Measures: TypeAlias = Annotated[dict[Name, float], msgspec.Meta(max_length=64)]
Amounts: TypeAlias = Annotated[dict[Name, Count], msgspec.Meta(max_length=64)]


_encoder = msgspec.json.Encoder()


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Anything on the wire."""


class Hello(Message, frozen=True, kw_only=True, tag="hello", tag_field="kind"):
    """Opens a stream. `generation` is the one this worker believes to be a member of.

    `previous` is the incarnation that this process had when it was last a member; it trains no more as that.
    """

    protocol: int
    worker: WorkerId
    incarnation: Name
    generation: int | None = None
    previous: Name | None = None
    local_world_size: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1
    attributes: Attributes = msgspec.field(default_factory=dict)


class Progress(Message, frozen=True, kw_only=True, tag="progress", tag_field="kind"):
    """The newest committed step."""

    incarnation: Name
    generation: Count
    epoch: Count
    step: Count
    learning_rate: float
    samples: Count = 0
    global_batch_size: Count = 0
    metrics: Measures = msgspec.field(default_factory=dict)


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat", tag_field="kind"):
    """A sign of life; answered by a `Pong` with the same sequence number."""

    incarnation: Name
    generation: Count
    sequence: Count


class Ready(Message, frozen=True, kw_only=True, tag="ready", tag_field="kind"):
    """This worker has stopped and stands at the rescale barrier; one that leaves says so, too."""

    incarnation: Name
    generation: Count
    committed_step: Step
    prepared_step: Step | None = None
    attributes: Attributes = msgspec.field(default_factory=dict)


class Formed(Message, frozen=True, kw_only=True, tag="formed", tag_field="kind"):
    """This worker is in the new group and healed. `moved` says what it received, by name."""

    incarnation: Name
    generation: Count
    moved: Amounts = msgspec.field(default_factory=dict)


class Suspect(Message, frozen=True, kw_only=True, tag="suspect", tag_field="kind"):
    """A collective failed although nobody was reported lost."""

    incarnation: Name
    generation: Count
    worker_id: Name | None = None
    reason: Text = ""


class Leave(Message, frozen=True, kw_only=True, tag="leave", tag_field="kind"):
    """This worker wants to go after its current step."""

    incarnation: Name
    generation: Count
    reason: Text = ""


class Finish(Message, frozen=True, kw_only=True, tag="finish", tag_field="kind"):
    """Training is complete."""

    incarnation: Name
    generation: Count
    reason: Text = ""


class Abort(Message, frozen=True, kw_only=True, tag="abort", tag_field="kind"):
    """The training code raised. `fatal` ends the run for everybody."""

    incarnation: Name
    generation: Count
    reason: Text
    traceback: Text = ""
    fatal: bool = False


FromWorker: TypeAlias = (
    Hello | Progress | Heartbeat | Ready | Formed | Suspect | Leave | Finish | Abort
)


class State(Message, frozen=True, kw_only=True):
    """Where training stands, as far as the coordinator was told."""

    epoch: Count = 0
    step: Step = -1
    learning_rate: float = 0.0
    samples: Count = 0
    global_batch_size: Count = 0


class Welcome(Message, frozen=True, kw_only=True, tag="welcome", tag_field="kind"):
    """The stream is accepted. `workers` is set if the worker is a member of `generation`."""

    generation: int
    workers: tuple[WorkerId, ...] | None = None
    heartbeat_interval_ms: int
    is_standby: bool = False
    state: State = State()


class Refused(Message, frozen=True, kw_only=True, tag="refused", tag_field="kind"):
    """The stream ends here. `code` is one of the `REFUSED_*` constants."""

    code: str
    reason: str


REFUSED_FENCED = "fenced"
"""The sender was declared dead or removed; it may come back as a newcomer with a new incarnation."""
REFUSED_DUPLICATE = "duplicate"
"""A living worker has this id; trying again later may work."""
REFUSED_ENDED = "ended"
"""The run is over."""
REFUSED_INVALID = "invalid"
"""The message breaks the protocol; trying again is useless."""
REFUSED_FULL = "full"
"""There are as many workers and standbys as the coordinator keeps track of."""


class Stale(Message, frozen=True, kw_only=True, tag="stale", tag_field="kind"):
    """A message spoke of an older generation and was ignored."""

    generation: int
    reason: str


class Change(Message, frozen=True, kw_only=True):
    """From one list of members to the next: who goes, and who comes in at which rank."""

    removed: tuple[str, ...] = ()
    inserted: tuple[tuple[int, WorkerId], ...] = ()


class Rescale(Message, frozen=True, kw_only=True, tag="rescale", tag_field="kind"):
    """A new generation was decided. `workers`, or else `change` against `old_generation`, has its members."""

    generation: int
    old_generation: int
    workers: tuple[WorkerId, ...] | None = None
    change: Change | None = None
    urgent: bool = True
    paused: bool = False
    reason: str = ""
    decided_at: datetime


class MemberReport(Message, frozen=True, kw_only=True):
    """What one member said at the barrier."""

    committed_step: int
    prepared_step: int | None = None
    attributes: dict[str, str] = msgspec.field(default_factory=dict)
    is_newcomer: bool = False


class FormationNotice(Message, frozen=True, kw_only=True, tag="formation", tag_field="kind"):
    """All members stand at the barrier; what they said is the same for everybody.

    Most members say the same, and every member hears about all others, so the reports travel as the `distinct`
    ones and `runs` of (index, number of ranks): a thousand workers cost a few hundred bytes each, not 80 kB.
    """

    generation: int
    distinct: tuple[MemberReport, ...]
    runs: tuple[tuple[int, int], ...]
    target_step: int
    state: State = State()

    @property
    def reports(self) -> tuple[MemberReport, ...]:
        """One report per member, in order of rank."""
        return tuple(self.distinct[index] for index, count in self.runs for _ in range(count))


def distinct_runs(
    reports: Iterable[MemberReport],
) -> tuple[tuple[MemberReport, ...], tuple[tuple[int, int], ...]]:
    """The `distinct` reports and the `runs` of a `FormationNotice`."""
    known: dict[bytes, int] = {}
    distinct: list[MemberReport] = []
    runs: list[tuple[int, int]] = []
    for report in reports:
        index = known.setdefault(_encoder.encode(report), len(distinct))
        if index == len(distinct):
            distinct.append(report)
        if runs and runs[-1][0] == index:
            runs[-1] = (index, runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return tuple(distinct), tuple(runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """The outcome of a rescale barrier, identical on all members.

    `members` maps worker ids to what each said. `target_step` is the newest step that any member who was
    here before has committed: a member one step behind that holds its reduced gradient rolls forward,
    others and newcomers are healed to it. It is -1 when nobody has committed anything.
    """

    generation: int
    topology: ClusterTopology
    members: Mapping[str, MemberReport]
    target_step: int

    @property
    def newcomers(self) -> tuple[str, ...]:
        """Members that were not in the last formed generation, in order of rank."""
        return tuple(name for name, report in self.members.items() if report.is_newcomer)

    @property
    def donors(self) -> tuple[str, ...]:
        """Members that have committed the target step, in order of rank."""
        return tuple(
            name
            for name, report in self.members.items()
            if report.committed_step == self.target_step and not report.is_newcomer
        )


class Pong(Message, frozen=True, kw_only=True, tag="pong", tag_field="kind"):
    """The answer to a heartbeat."""

    sequence: int


class Released(Message, frozen=True, kw_only=True, tag="released", tag_field="kind"):
    """Nobody needs this worker any more; it may go."""

    reason: str


class Ended(Message, frozen=True, kw_only=True, tag="ended", tag_field="kind"):
    """The run is over. `emergency` asks survivors to save what they have."""

    outcome: RunOutcome
    reason: str
    emergency: bool = False


FromCoordinator: TypeAlias = (
    Welcome | Refused | Stale | Rescale | FormationNotice | Pong | Released | Ended
)

_from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
_from_coordinator: msgspec.json.Decoder[FromCoordinator] = msgspec.json.Decoder(FromCoordinator)


def to_bytes(message: Any) -> bytes:
    """The message as JSON."""
    return _encoder.encode(message)


def from_worker(data: bytes) -> FromWorker:
    """Decode what a worker sent; anything else is an `EncodingError` that names the place."""
    try:
        return _from_worker.decode(data)
    except msgspec.DecodeError as error:
        raise EncodingError(f"not a message of a worker: {error}") from error


def from_coordinator(data: bytes) -> FromCoordinator:
    """Decode what the coordinator sent; anything else is an `EncodingError`."""
    try:
        return _from_coordinator.decode(data)
    except msgspec.DecodeError as error:
        raise EncodingError(f"not a message of a coordinator: {error}") from error


def change_between(old: tuple[WorkerId, ...], new: tuple[WorkerId, ...]) -> Change | None:
    """The change that leads from `old` to `new`, or `None` if those who stay changed their order."""
    new_set, old_set = set(new), set(old)
    stays = tuple(worker for worker in old if worker in new_set)
    if stays != tuple(worker for worker in new if worker in old_set):
        return None
    return Change(
        removed=tuple(worker.id for worker in old if worker not in new_set),
        inserted=tuple((rank, w) for rank, w in enumerate(new) if w not in old_set),
    )


def apply_change(old: tuple[WorkerId, ...], change: Change) -> tuple[WorkerId, ...]:
    """The members after `change`: the inverse of `change_between`."""
    removed = set(change.removed)
    members = [worker for worker in old if worker.id not in removed]
    for rank, worker in change.inserted:
        members.insert(rank, worker)
    return tuple(members)
