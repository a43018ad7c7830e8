"""The messages between a worker and the coordinator, as JSON that is checked on arrival.

A worker opens one stream. It sends `Hello` first, then any of `FromWorker`; the coordinator sends any of
`FromCoordinator`. A worker's message carries its incarnation (which process this is) and the generation that it
is about. The decoder refuses unknown kinds, unknown fields, wrong types and oversized values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.cluster.goal import Goal
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WorkerId
from tensorforge.elastic.protocol.reasons import RunOutcome
from tensorforge.errors import EncodingError, InvalidInputError

PROTOCOL = 3
"""The version of these messages; the coordinator refuses a worker with another one."""

MAX_UPLOAD_BYTES = 1 << 20
"""The largest message that a worker may send."""

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=20_000)]
MOST = 2**53
"""The largest number in a message; JSON readers that use floating point agree on numbers up to here."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Step: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=MOST)]
Attributes: TypeAlias = Annotated[
    dict[Name, Annotated[str, msgspec.Meta(max_length=4_000)]], msgspec.Meta(max_length=64)
]
Terms: TypeAlias = Annotated[
    dict[Name, Annotated[str, msgspec.Meta(max_length=4_000)]], msgspec.Meta(max_length=256)
]
Measures: TypeAlias = Annotated[dict[Name, float | None], msgspec.Meta(max_length=64)]
"""Values by name. JSON has neither NaN nor infinity: `None` stands for both."""
Amounts: TypeAlias = Annotated[dict[Name, Count], msgspec.Meta(max_length=64)]


Decoded = TypeVar("Decoded")

_encoder = msgspec.json.Encoder()


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Any message; unknown fields are refused."""


class Hello(Message, frozen=True, kw_only=True, tag="hello", tag_field="kind"):
    """The first message of a stream. `generation` is the newest one that was announced to this incarnation.

    `previous` is the earlier incarnation of this process that was a member; it has stopped training. `terms`
    are the facts that must be the same on all workers, and `goal` is how far the script wants to train.
    `config` is set if the worker was given a configuration of its own, which must be the run's.
    """

    protocol: int
    worker: WorkerId
    incarnation: Name
    generation: Count | None = None
    previous: Name | None = None
    attributes: Attributes = msgspec.field(default_factory=dict)
    terms: Terms = msgspec.field(default_factory=dict)
    goal: Goal | None = None
    config: ElasticTrainingConfig | None = None


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
    """This worker has stopped for a rescale; a worker that leaves says so, too.

    `prepared_step`: the worker has the reduced gradient of that step, but has not applied it.
    `last_generation` is the last one in which the worker was in a working group; 0 before the first.
    """

    incarnation: Name
    generation: Count
    committed_step: Step
    prepared_step: Step | None = None
    last_generation: Count = 0
    attributes: Attributes = msgspec.field(default_factory=dict)


class Formed(Message, frozen=True, kw_only=True, tag="formed", tag_field="kind"):
    """This worker has formed the new group and is healed. `moved` is what it received, by name."""

    incarnation: Name
    generation: Count
    moved: Amounts = msgspec.field(default_factory=dict)


class Suspect(Message, frozen=True, kw_only=True, tag="suspect", tag_field="kind"):
    """A collective failed although no member was reported lost. `worker_id` is suspected, if anybody is."""

    incarnation: Name
    generation: Count
    worker_id: Name | None = None
    reason: Text = ""


class Leave(Message, frozen=True, kw_only=True, tag="leave", tag_field="kind"):
    """This worker wants to leave after its current step.

    `together`: all members of the generation leave after the same step. `stops_if_last`: if nobody can take
    over this worker's state, it does not leave but stops the run, as soon as a `LeaveRefused` tells so.
    """

    incarnation: Name
    generation: Count
    reason: Text = ""
    together: bool = False
    stops_if_last: bool = False


class Finish(Message, frozen=True, kw_only=True, tag="finish", tag_field="kind"):
    """Training is over on this member, after `committed_step`; `epoch` is the one of the step after it.

    Every member of a generation says so after the same step. Whether the goal was reached is decided by the
    coordinator.
    """

    incarnation: Name
    generation: Count
    committed_step: Step
    epoch: Count = 0
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
    """The newest committed step that the coordinator knows; a step of -1 means none."""

    epoch: Count = 0
    step: Step = -1
    learning_rate: float = 0.0
    samples: Count = 0
    global_batch_size: Count = 0


class Welcome(Message, frozen=True, kw_only=True, tag="welcome", tag_field="kind"):
    """The stream is accepted. `workers` is set if the worker is a member of `generation`.

    `config` is the run's configuration, which the worker uses from now on.
    """

    generation: int
    config: ElasticTrainingConfig
    workers: tuple[WorkerId, ...] | None = None


class Refused(Message, frozen=True, kw_only=True, tag="refused", tag_field="kind"):
    """The stream is refused and ends. `code` is one of the `REFUSED_*` constants."""

    code: str
    reason: str


REFUSED_FENCED = "fenced"
"""The worker was taken for dead or removed; it may join again with a new incarnation."""
REFUSED_DUPLICATE = "duplicate"
"""A connected worker has this id; trying again later may work."""
REFUSED_INVALID = "invalid"
"""The message breaks the protocol; trying again does not help."""
REFUSED_TERMS = "terms"
"""The worker's terms, goal or configuration are not the run's; the reason names each difference."""
REFUSED_FULL = "full"
"""The coordinator has as many workers and standbys as it accepts."""


class Stale(Message, frozen=True, kw_only=True, tag="stale", tag_field="kind"):
    """A message was about another generation than the newest one, and was ignored."""

    reason: str


class Change(Message, frozen=True, kw_only=True):
    """The difference between two lists of members: who was removed, who was inserted at which rank."""

    removed: tuple[str, ...] = ()
    inserted: tuple[tuple[int, WorkerId], ...] = ()


class Rescale(Message, frozen=True, kw_only=True, tag="rescale", tag_field="kind"):
    """A generation was decided. Its members are `workers`, or else those of `old_generation` after `change`.

    `urgent`: a member is lost, so the current step cannot be finished.
    """

    generation: int
    old_generation: int
    workers: tuple[WorkerId, ...] | None = None
    change: Change | None = None
    urgent: bool = True
    reason: str = ""
    decided_at: datetime


class MemberReport(Message, frozen=True, kw_only=True):
    """What one member said at the barrier."""

    committed_step: int
    prepared_step: int | None = None
    last_generation: int = 0
    attributes: dict[str, str] = msgspec.field(default_factory=dict)
    is_newcomer: bool = False


class Verdict(Message, frozen=True, kw_only=True):
    """How the members of a generation come to one state. Ranks are given as (first, count) of sequences.

    All members will have committed `target_step`. Those in `roll_forward` commit the step that they have
    prepared; then `donors` send the state to all others. `is_fresh`: nobody has committed a step, so rank 0 may
    restore a checkpoint, and the others take its state.
    """

    target_step: int
    roll_forward: tuple[tuple[int, int], ...] = ()
    donors: tuple[tuple[int, int], ...] = ()
    is_fresh: bool = False

    def rolls_forward(self, rank: int) -> bool:
        """Whether this member commits its prepared step."""
        return any(first <= rank < first + count for first, count in self.roll_forward)

    def donor_ranks(self) -> tuple[int, ...]:
        """The members that have the state once the prepared step is committed."""
        return tuple(first + n for first, count in self.donors for n in range(count))


class FormationNotice(Message, frozen=True, kw_only=True, tag="formation", tag_field="kind"):
    """All members have answered the barrier; every member gets the same notice.

    Most answers are equal, and every member gets all of them. So the notice has the `distinct` answers, and
    `runs` of (index, number of ranks): for a thousand workers a few hundred bytes each instead of 80 kB.
    """

    generation: int
    distinct: tuple[MemberReport, ...]
    runs: tuple[tuple[int, int], ...]
    verdict: Verdict

    @property
    def target_step(self) -> int:
        """The step that all members will have committed."""
        return self.verdict.target_step

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

    `members` maps worker ids to their answers, in order of rank. `verdict` says how they come to one state.
    """

    generation: int
    topology: ClusterTopology
    members: Mapping[str, MemberReport]
    verdict: Verdict

    @property
    def target_step(self) -> int:
        """The step that all members will have committed; -1 if there is none."""
        return self.verdict.target_step

    @property
    def newcomers(self) -> tuple[str, ...]:
        """The members that get the state from others, in order of rank."""
        donors = set(self.verdict.donor_ranks())
        return tuple(name for rank, name in enumerate(self.members) if rank not in donors)

    @property
    def donors(self) -> tuple[str, ...]:
        """The members that have the target step, or roll it forward, and can heal others, in order of rank."""
        donors = set(self.verdict.donor_ranks())
        return tuple(name for rank, name in enumerate(self.members) if rank in donors)


class Pong(Message, frozen=True, kw_only=True, tag="pong", tag_field="kind"):
    """The answer to a heartbeat."""

    sequence: int


class Released(Message, frozen=True, kw_only=True, tag="released", tag_field="kind"):
    """The others do not need this worker any more; it may leave."""

    reason: str


class LeaveRefused(Message, frozen=True, kw_only=True, tag="leave_refused", tag_field="kind"):
    """Nobody can take over the state of this worker, which asked to leave; it may stop the run instead."""

    reason: str


class Ended(Message, frozen=True, kw_only=True, tag="ended", tag_field="kind"):
    """The run is over. `emergency` asks for a checkpoint, which the member called `saver` saves."""

    outcome: RunOutcome
    reason: str
    emergency: bool = False
    saver: str | None = None


FromCoordinator: TypeAlias = (
    Welcome | Refused | Stale | Rescale | FormationNotice | Pong | Released | LeaveRefused | Ended
)

_from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
_from_coordinator: msgspec.json.Decoder[FromCoordinator] = msgspec.json.Decoder(FromCoordinator)


def to_bytes(message: Any) -> bytes:
    """The message as JSON."""
    return _encoder.encode(message)


def from_worker(data: bytes) -> FromWorker:
    """Decode a worker's message; anything else is an `EncodingError` that names the place."""
    return decode(_from_worker, data, "a message of a worker")


def from_coordinator(data: bytes) -> FromCoordinator:
    """Decode a message of the coordinator; anything else is an `EncodingError`."""
    return decode(_from_coordinator, data, "a message of a coordinator")


def decode(decoder: msgspec.json.Decoder[Decoded], data: bytes, what: str) -> Decoded:
    """Decode JSON; `what` it should be is named by the `EncodingError` for anything else."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, InvalidInputError, UnicodeDecodeError, RecursionError) as error:
        raise EncodingError(f"not {what}: {error}") from error


def change_between(old: tuple[WorkerId, ...], new: tuple[WorkerId, ...]) -> Change | None:
    """The change from `old` to `new`, or `None` if those who stay are in another order."""
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
