"""How training knows who takes part: a small protocol and its simplest implementations.

`ElasticMembership` (in `elastic_membership`) speaks to a coordinator. The ones here need none: a run of one
process, and a fixed set of processes started by something like torchrun, which cannot lose a member.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.cluster.rescaling import RescalingEvent
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WorkerId
from tensorforge.errors import ConfigurationError, TrainingAbortedError


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The run is over for everybody. `outcome`: `"completed"`, `"stopped"` or `"aborted"`."""

    outcome: str
    reason: str


class Membership(Protocol):
    """This worker's place in the cluster.

    `connect` starts it; from then on `rescaling_requested` is called, from any thread and without
    blocking, for each generation in which this worker is a member or stops being one, and `run_ended` when
    there is nothing more to do. All other calls but the two waits return at once.
    """

    @property
    def worker_id(self) -> WorkerId:
        """Who this is."""
        ...

    @property
    def config(self) -> ElasticTrainingConfig:
        """The cluster's settings."""
        ...

    def connect(
        self,
        rescaling_requested: Callable[[RescalingEvent], None],
        run_ended: Callable[[RunEnd], None],
        fenced: Callable[[str], None],
    ) -> None:
        """Join. `fenced` is called when the cluster took this worker for dead and went on."""
        ...

    def ready(
        self, generation: int, committed_step: int, prepared_step: int | None, store: str | None
    ) -> None:
        """This worker has stopped; rank 0 of the new generation offers its store."""
        ...

    def wait_for_store(self, generation: int, timeout: float) -> str | None:
        """Wait until all members of `generation` are ready; return the address of rank 0's store.

        The address is empty if there is one member. `None` if another generation follows instead, the run has
        ended, or `timeout` seconds are over.
        """
        ...

    def formed(self, generation: int, moved: Mapping[str, int]) -> None:
        """This worker is in the new group, with the same state as the others; what that moved."""
        ...

    def report(self, step: CommittedStep) -> None:
        """Tell of a committed step."""
        ...

    def suspect(self, generation: int, reason: str) -> None:
        """The group broke and nobody has said why."""
        ...

    def leave(self, reason: str) -> bool:
        """Ask to go after the current step; `False` if there is nobody to ask, and the run must stop."""
        ...

    def wait_for_release(self, timeout: float) -> bool:
        """Wait until nobody needs this worker any more."""
        ...

    def finish(self, reason: str) -> None:
        """Training is complete, on all members."""
        ...

    def abort(self, reason: str, traceback: str) -> None:
        """The training code failed on this worker."""
        ...

    def close(self) -> None:
        """Disconnect."""
        ...


class FixedMembership:
    """A set of processes that never changes. With one process it needs nobody and nothing."""

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
        self._address = ""

    @classmethod
    def from_environment(cls) -> FixedMembership:
        """The place that torchrun and its like describe with RANK, WORLD_SIZE and MASTER_ADDR."""
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
        """Who this is."""
        return self._workers[self._rank]

    @property
    def config(self) -> ElasticTrainingConfig:
        """The default settings."""
        return ElasticTrainingConfig()

    def connect(
        self,
        rescaling_requested: Callable[[RescalingEvent], None],
        run_ended: Callable[[RunEnd], None],  # noqa: ARG002  nobody ends such a run from outside
        fenced: Callable[[str], None],  # noqa: ARG002
    ) -> None:
        """Announce the only generation that there will be."""
        nobody = ClusterTopology()
        everybody = nobody.succeed(self._workers)
        rescaling_requested(RescalingEvent.between(nobody, everybody, "the run starts"))

    def ready(
        self,
        generation: int,  # noqa: ARG002
        committed_step: int,  # noqa: ARG002
        prepared_step: int | None,  # noqa: ARG002
        store: str | None,
    ) -> None:
        """Publish rank 0's store."""
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
        if store is not None:
            self._store.set("tensorforge/store", store)

    def wait_for_store(self, generation: int, timeout: float) -> str | None:  # noqa: ARG002
        """Read the address that rank 0 published."""
        if self._world_size == 1:
            return ""
        self._store.wait(["tensorforge/store"], timedelta(seconds=timeout))
        return str(self._store.get("tensorforge/store").decode())

    def formed(self, generation: int, moved: Mapping[str, int]) -> None:
        """Nobody has to know."""

    def report(self, step: CommittedStep) -> None:
        """Nobody watches."""

    def suspect(self, generation: int, reason: str) -> None:  # noqa: ARG002
        """Without a coordinator nobody can go on."""
        raise TrainingAbortedError(
            f"a member was lost ({reason}), and this run has a fixed set of processes; "
            "start it with `tensorforge run` to survive that"
        )

    def leave(self, reason: str) -> bool:  # noqa: ARG002
        """Nobody else can take over."""
        return False

    def wait_for_release(self, timeout: float) -> bool:  # noqa: ARG002
        """Nobody holds it."""
        return True

    def finish(self, reason: str) -> None:
        """Nobody has to know."""

    def abort(self, reason: str, traceback: str) -> None:
        """The others see the broken connections."""

    def close(self) -> None:
        """Give up the store."""
        self._store = None
