"""How a worker knows which workers take part: the protocol, and the implementation without a coordinator.

`FixedMembership` is for one process, or for a fixed set of processes that something like torchrun has started
and that cannot lose a member. `ElasticMembership` (in `elastic_membership`) is led by a coordinator.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import msgspec

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.cluster.elastic_config import AdaptationStrategy, ElasticTrainingConfig
from tensorforge.cluster.goal import Goal
from tensorforge.cluster.rescaling import RescalingEvent
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WorkerId
from tensorforge.elastic.coordinator.state_decision import decide
from tensorforge.elastic.protocol.messages import MemberReport, Verdict
from tensorforge.elastic.protocol.terms import differences
from tensorforge.errors import ConfigurationError, InvalidInputError, TrainingAbortedError

_published: msgspec.json.Decoder[tuple[MemberReport, dict[str, str]]] = msgspec.json.Decoder(
    tuple[MemberReport, dict[str, str]]
)


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The run is over on all workers. `outcome`: `"completed"`, `"stopped"` or `"aborted"`.

    `emergency` asks this worker to save a checkpoint before it ends.
    """

    outcome: str
    reason: str
    emergency: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """All members are ready: the address of rank 0's store (empty for one member), and what to do first."""

    store: str
    verdict: Verdict


class Membership(Protocol):
    """This worker's membership in the cluster. All calls but the two waits return at once."""

    @property
    def worker_id(self) -> WorkerId:
        """This worker's name and address."""
        ...

    @property
    def config(self) -> ElasticTrainingConfig:
        """The cluster's settings; they are known once `connect` has returned."""
        ...

    def connect(
        self,
        rescaling_requested: Callable[[RescalingEvent], None],
        run_ended: Callable[[RunEnd], None],
        fenced: Callable[[str], None],
        *,
        terms: Mapping[str, str],
        goal: Goal,
    ) -> None:
        """Join the cluster, whose terms and goal must be these.

        From then on any thread may call the callbacks, which must not block.

        `rescaling_requested`: a generation begins in which this worker is a member or stops being one.
        `run_ended`: the run is over. `fenced`: the cluster has given this worker up for dead and goes on.
        """
        ...

    def ready(
        self, generation: int, committed_step: int, prepared_step: int | None, store: str | None
    ) -> None:
        """Say that this worker waits for `generation` to form, at which step, and rank 0's `store` address."""
        ...

    def wait_for_start(self, generation: int, timeout: float) -> Start | None:
        """Wait until all members of `generation` are ready, and it is decided how they come to one state.

        `None` if another generation follows instead, the run has ended, or `timeout` seconds are over.
        """
        ...

    def formed(self, generation: int, moved: Mapping[str, int]) -> None:
        """Say that this worker is in the group, with the state of all members, and what was moved for that."""
        ...

    def report(self, step: CommittedStep) -> None:
        """Report a committed step."""
        ...

    def suspect(self, generation: int, reason: str) -> None:
        """Report that the group broke for a reason that is not known here."""
        ...

    def leave(self, reason: str, *, together: bool) -> bool:
        """Ask for a generation without this worker; `False` if no coordinator can make one.

        `together`: all members of the generation ask for it after the same step.
        """
        ...

    @property
    def leave_refused(self) -> str | None:
        """Why this worker, which asked to leave, cannot: nobody can take over its state. `None` otherwise."""
        ...

    def wait_for_release(self, timeout: float) -> bool:
        """Wait until the other workers have formed a generation without this one; return whether they have."""
        ...

    def finish(self, reason: str, *, committed_step: int, epoch: int) -> None:
        """Report that training is over on all members after this step; `epoch` is the next step's."""
        ...

    def abort(self, reason: str, traceback: str) -> None:
        """Report that the training code raised on this worker."""
        ...

    def close(self) -> None:
        """Disconnect."""
        ...


class FixedMembership:
    """A set of processes that never changes. `master` is the HOST:PORT at which several processes meet."""

    def __init__(self, rank: int = 0, world_size: int = 1, master: str = "") -> None:
        if not 0 <= rank < world_size:
            raise ConfigurationError("rank", rank, f"must lie between 0 and {world_size - 1}")
        if world_size > 1 and not master:
            raise ConfigurationError(
                "master", master, "several processes need a HOST:PORT to meet at"
            )
        self._rank = rank
        self._world_size = world_size
        self._host, _, self._port = (master or "127.0.0.1:0").rpartition(":")
        self._workers = tuple(WorkerId(f"rank{n}", self._host, 0) for n in range(world_size))
        self._store: Any = None
        self._terms: dict[str, str] = {}
        self._report = MemberReport(committed_step=-1)

    @classmethod
    def from_environment(cls) -> FixedMembership:
        """The rank and the size that torchrun and its like set in RANK, WORLD_SIZE and MASTER_ADDR."""
        if "WORLD_SIZE" not in os.environ:
            return cls()
        try:
            master = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT'])}"
            return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), master)
        except (KeyError, ValueError) as error:
            raise ConfigurationError(
                "WORLD_SIZE",
                os.environ["WORLD_SIZE"],
                f"RANK, MASTER_ADDR and MASTER_PORT must be set beside it ({error!r})",
            ) from error

    @property
    def worker_id(self) -> WorkerId:
        """This process, named by its rank."""
        return self._workers[self._rank]

    @property
    def config(self) -> ElasticTrainingConfig:
        """The default settings; a number of processes that never changes needs no adaptation."""
        return ElasticTrainingConfig(lr_adaptation_strategy=AdaptationStrategy.NONE)

    def connect(
        self,
        rescaling_requested: Callable[[RescalingEvent], None],
        run_ended: Callable[[RunEnd], None],  # noqa: ARG002
        fenced: Callable[[str], None],  # noqa: ARG002
        *,
        terms: Mapping[str, str],
        goal: Goal,
    ) -> None:
        """Announce the only generation."""
        self._terms = {**terms, "goal": str(goal)}
        empty = ClusterTopology()
        first = empty.succeed(self._workers)
        rescaling_requested(RescalingEvent.between(empty, first, "the run starts"))

    def ready(
        self,
        generation: int,  # noqa: ARG002
        committed_step: int,
        prepared_step: int | None,
        store: str | None,
    ) -> None:
        """Publish this process's report and terms, and rank 0's store."""
        self._report = MemberReport(committed_step=committed_step, prepared_step=prepared_step)
        if self._world_size == 1:
            return
        import torch.distributed

        dist: Any = torch.distributed
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._store = dist.TCPStore(
            self._host,
            int(self._port),
            None,
            self._rank == 0 and not hosted,
            timeout=timedelta(seconds=60),
            wait_for_workers=False,
        )
        published = msgspec.json.encode((self._report, self._terms))
        self._store.set(f"tensorforge/report-{self._rank}", published.decode())
        if store is not None:
            self._store.set("tensorforge/store", store)

    def wait_for_start(self, generation: int, timeout: float) -> Start | None:  # noqa: ARG002
        """Read what the others published, and decide as a coordinator would."""
        if self._world_size == 1:
            return Start("", decide([self._report]))
        keys = [f"tensorforge/report-{rank}" for rank in range(self._world_size)]
        self._store.wait([*keys, "tensorforge/store"], timedelta(seconds=timeout))
        reports = []
        for rank, key in enumerate(keys):
            report, terms = _published.decode(self._store.get(key))
            why = differences(self._terms, terms)
            if why:
                raise InvalidInputError(f"this process does not fit to rank {rank}: {why}")
            reports.append(report)
        return Start(self._store.get("tensorforge/store").decode(), decide(reports))

    def formed(self, generation: int, moved: Mapping[str, int]) -> None:
        """Do nothing: no coordinator waits for it."""

    def report(self, step: CommittedStep) -> None:
        """Do nothing: no coordinator collects reports."""

    def suspect(self, generation: int, reason: str) -> None:  # noqa: ARG002
        """Raise `TrainingAbortedError`: a fixed set of processes cannot go on without a member."""
        raise TrainingAbortedError(
            f"a member was lost ({reason}), and this run has a fixed set of processes; "
            "start it with `tensorforge run` to survive that"
        )

    def leave(self, reason: str, *, together: bool) -> bool:  # noqa: ARG002
        """Refuse: the other processes cannot go on without this one."""
        return False

    @property
    def leave_refused(self) -> str | None:
        """Always `None`: `leave` refuses at once."""
        return None

    def wait_for_release(self, timeout: float) -> bool:  # noqa: ARG002
        """Return at once: no coordinator has to release this process."""
        return True

    def finish(self, reason: str, *, committed_step: int, epoch: int) -> None:
        """Do nothing: all processes end by themselves."""

    def abort(self, reason: str, traceback: str) -> None:
        """Do nothing: the other processes notice the broken connections."""

    def close(self) -> None:
        """Drop the store."""
        self._store = None
