"""What a worker knows about its membership, and how the coordinator's messages change it.

Callers hold the worker's lock.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from tensorforge.cluster.global_state import GlobalTrainingState
from tensorforge.cluster.rescaling import RescalingEvent
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WORKER_LIFECYCLE, WorkerId, WorkerMetadata, WorkerStatus
from tensorforge.elastic.protocol import messages
from tensorforge.elastic.protocol.messages import Formation
from tensorforge.errors import (
    ClosedError,
    StaleGenerationError,
    TensorForgeError,
    TrainingAbortedError,
)

log = logging.getLogger(__name__)

_NOBODY = ClusterTopology(epoch=0)


class WorkerState:
    """A worker's membership: what was announced, what it answered, how it ended.

    `announced` is the newest topology that the coordinator sent. `topology` is the one that training uses;
    it becomes the announced one when the barrier is answered. `is_welcomed`: the present stream is
    accepted. Before that, only the hello is sent: acceptance makes the kept messages go out again, and a
    heartbeat that overtook them could be answered before they arrive. `was_welcomed`: some stream was
    accepted.
    """

    def __init__(self, metadata: WorkerMetadata, incarnation: str) -> None:
        self.metadata = metadata
        self.incarnation = incarnation
        self.previous: str | None = None
        self.training: GlobalTrainingState | None = None
        self.topology: ClusterTopology | None = None
        self.announced: ClusterTopology | None = None
        self.event: RescalingEvent | None = None
        self.formation: Formation | None = None
        self.assigned: tuple[int, frozenset[int]] | None = None
        self.committed_step = -1
        self.last_formed = 0
        """The last generation in which this worker was in a working group; 0 before the first."""
        self.was_welcomed = False
        self.is_welcomed = False
        self.is_rescaling = False
        self.is_answered = False
        self.is_leaving = False
        self.leave_refused: str | None = None
        self.released: str | None = None
        self.ended: messages.Ended | None = None
        self.problem: TensorForgeError | None = None
        self.is_closed = False

    @property
    def worker_id(self) -> WorkerId:
        """The name and address of this worker."""
        return self.metadata.worker_id

    @property
    def generation(self) -> int | None:
        """The newest generation that was announced to this worker."""
        return None if self.announced is None else self.announced.epoch

    @property
    def pending_event(self) -> RescalingEvent | None:
        """The newest rescale that was announced and not yet answered."""
        return None if self.is_answered else self.event

    @property
    def is_over(self) -> bool:
        """Whether the coordinator will send nothing more."""
        reasons = (self.ended, self.released, self.problem)
        return self.is_closed or any(reason is not None for reason in reasons)

    def raise_if_over(self) -> None:
        """Raise the reason why the coordinator will send nothing more, if that is so."""
        if self.ended is not None:
            ended = self.ended
            raise TrainingAbortedError(
                ended.reason,
                outcome=ended.outcome,
                emergency=ended.emergency and ended.saver == self.worker_id.id,
            )
        if self.problem is not None:
            raise self.problem
        if self.released is not None:
            raise ClosedError(f"{self.worker_id.id} was released: {self.released}")
        if self.is_closed:
            raise ClosedError(f"{self.worker_id.id} is disconnected")

    def announce(self, message: messages.Rescale) -> RescalingEvent | None:
        """Adopt an announced generation; `None` if it is not newer or does not follow the known one."""
        old = self.announced or _NOBODY
        if message.generation <= old.epoch:
            return None
        if message.workers is not None:
            workers = message.workers
        elif message.change is not None and old.epoch == message.old_generation:
            workers = messages.apply_change(old.workers, message.change)
        else:
            log.warning(
                "ignored generation %d: it does not follow %d", message.generation, old.epoch
            )
            return None
        at = message.decided_at
        new = ClusterTopology(workers=workers, epoch=message.generation, last_updated=at)
        self.announced = new
        self.formation = None
        self.is_leaving = self.is_leaving or self.worker_id not in new
        return RescalingEvent.between(old, new, message.reason, urgent=message.urgent, at=at)

    def begin(self, event: RescalingEvent) -> None:
        """A rescale was announced; training code has to answer it."""
        self.is_rescaling = True
        self.is_answered = False
        self.event = event
        self.move(WorkerStatus.RESCALING)

    def answer(self, generation: int, committed_step: int) -> bool:
        """Training has stopped; returns whether this is the first answer to the newest generation."""
        if self.announced is None or generation != self.announced.epoch or self.is_answered:
            return False
        self.committed_step = committed_step
        self.is_answered = True
        self.formation = None
        self.topology = self.announced
        self._take_rank(self.announced)
        return True

    def gather(self, notice: messages.FormationNotice) -> bool:
        """All members have answered; returns whether this is about the newest generation."""
        topology = self.announced
        if topology is None or notice.generation != topology.epoch:
            return False
        names = (worker.id for worker in topology.workers)
        self.formation = Formation(
            generation=notice.generation,
            topology=topology,
            members=dict(zip(names, notice.reports, strict=True)),
            verdict=notice.verdict,
        )
        return True

    def resume(self) -> None:
        """Training goes on."""
        self.is_rescaling = False
        self.move(WorkerStatus.ACTIVE)

    def adopt(self, topology: ClusterTopology) -> None:
        """Train with a later topology; an older generation is a `StaleGenerationError`."""
        current = self.topology
        if current is not None and topology.epoch < current.epoch:
            raise StaleGenerationError(
                f"generation {topology.epoch} is older than {current.epoch}, the current one"
            )
        self.topology = topology
        self._take_rank(topology)

    def start_over(self, incarnation: str) -> None:
        """The cluster went on without this process: it is a newcomer from now on."""
        if self.announced is not None:
            self.previous = self.incarnation
        self.incarnation = incarnation
        self.announced = self.formation = self.event = None
        self.is_answered = False
        self.metadata = replace(self.metadata, status=WorkerStatus.JOINING, rank=-1)

    def move(self, status: WorkerStatus) -> None:
        """Change the status if the lifecycle allows it."""
        if WORKER_LIFECYCLE.can_transition(self.metadata.status, status):
            self.metadata = replace(self.metadata, status=status)

    def _take_rank(self, topology: ClusterTopology) -> None:
        rank = topology.rank_of(self.worker_id) if self.worker_id in topology else -1
        self.metadata = replace(self.metadata, rank=rank)
