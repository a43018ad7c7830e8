"""A worker's place in the cluster: what it is told, what it answers, what its training code hooks into."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Self

from tensorforge.cluster.config import ElasticTrainingConfig
from tensorforge.cluster.events import RescalingEvent
from tensorforge.cluster.state import GlobalTrainingState
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.worker import WORKER_LIFECYCLE, WorkerId, WorkerMetadata, WorkerStatus
from tensorforge.elastic import messages
from tensorforge.elastic.access import TlsOptions
from tensorforge.elastic.connection import Connection
from tensorforge.elastic.formation import Formation
from tensorforge.elastic.hooks import RedistributionPlan, StateHooks
from tensorforge.elastic.timeouts import Timeouts
from tensorforge.errors import (
    ClosedError,
    ConflictError,
    DeadlineExceededError,
    InvalidInputError,
    StaleGenerationError,
    TensorForgeError,
    TrainingAbortedError,
    UnavailableError,
)

log = logging.getLogger(__name__)

_NOTHING = ClusterTopology(epoch=0)


class ElasticWorker:
    """One member, or member to be, of a training cluster.

    `connect_to_cluster` registers with the coordinator and returns; from then on threads of their own
    keep the connection, through losses of the coordinator as well. Calls that report something return at
    once and are delivered (again) after a reconnection. Callbacks are lists of functions that run on the
    stream thread and must not block:

    - `rescaling_requested(event)`: a new generation was decided; if `event.urgent`, abort collectives now.
    - `state_synchronized(state)`: `synchronize_state` has applied a state.
    - `fenced(reason)`: the cluster went on without this process; it rejoins as a newcomer by itself.
    - `run_ended(reason)`: the run is over for everybody.

    A rescale, seen from training code: stop (at once or after the step in hand), `ready`,
    `wait_for_formation`, re-form and heal, `formed`. With `use_synchronous_rescaling=False` (or
    `answers_by_itself`) the worker answers the barrier for training code that never needs to stop.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        config: ElasticTrainingConfig | None = None,
        *,
        token: str | None = None,
        tls: TlsOptions | None = None,
        attributes: Mapping[str, str] | None = None,
        local_world_size: int = 1,
        answers_by_itself: bool | None = None,
        hooks: StateHooks | None = None,
        data_executor: Callable[[RedistributionPlan], object] | None = None,
    ) -> None:
        self._config = config or ElasticTrainingConfig()
        self._config.validate()
        self._timeouts = Timeouts.derive(self._config)
        self._token, self._tls = token, tls
        synchronous = self._config.use_synchronous_rescaling
        self._answers_by_itself = (
            not synchronous if answers_by_itself is None else answers_by_itself
        )
        self._hooks = hooks or StateHooks()
        self._data_executor = data_executor
        self.rescaling_requested: list[Callable[[RescalingEvent], object]] = []
        self.state_synchronized: list[Callable[[GlobalTrainingState], object]] = []
        self.fenced: list[Callable[[str], object]] = []
        self.run_ended: list[Callable[[str], object]] = []
        self._changed = threading.Condition(threading.RLock())
        self._connection: Connection | None = None
        self._incarnation = uuid.uuid4().hex
        self._sequence = 0
        now = datetime.now(UTC)
        self._metadata = WorkerMetadata(
            worker_id=worker_id,
            status=WorkerStatus.JOINING,
            join_time=now,
            last_heartbeat=now,
            local_world_size=local_world_size,
            custom_attributes={"pid": str(os.getpid()), **(attributes or {})},
        )
        self._state: GlobalTrainingState | None = None
        self._topology: ClusterTopology | None = None
        self._announced: ClusterTopology | None = None
        self._event: RescalingEvent | None = None
        self._formation: Formation | None = None
        self._standing: dict[str, Any] = {}
        self._progress: messages.Progress | None = None
        self._committed_step = -1
        self._is_rescaling = False
        self._is_answered = False
        self._was_welcomed = False
        self._is_leaving = False
        self._released: str | None = None
        self._ended: messages.Ended | None = None
        self._problem: TensorForgeError | None = None
        self._is_closed = False
        self._assigned: tuple[int, frozenset[int]] | None = None

    # Who and where

    @property
    def worker_id(self) -> WorkerId:
        """This worker's name and address."""
        return self._metadata.worker_id

    @property
    def incarnation(self) -> str:
        """Which process of that name this is; a new one after it was fenced."""
        return self._incarnation

    @property
    def current_topology(self) -> ClusterTopology | None:
        """The members that this worker trains with, or will once it has answered the barrier."""
        return self._topology

    @property
    def current_state(self) -> GlobalTrainingState | None:
        """Where training stands, as last synchronized or updated."""
        return self._state

    @property
    def is_rescaling(self) -> bool:
        """Whether a rescale was announced and this worker has not resumed yet."""
        return self._is_rescaling

    @property
    def is_connected(self) -> bool:
        """Whether `connect_to_cluster` succeeded and `disconnect` was not called."""
        return self._connection is not None

    @property
    def is_leaving(self) -> bool:
        """Whether this worker asked, or was asked, to go."""
        return self._is_leaving

    @property
    def pending_event(self) -> RescalingEvent | None:
        """The newest rescale that was announced and not yet answered."""
        with self._changed:
            return None if self._is_answered else self._event

    def metadata(self) -> WorkerMetadata:
        """What this worker knows of itself: a copy, frozen at this moment."""
        with self._changed:
            return replace(self._metadata)

    # Connecting

    def connect_to_cluster(self, address: str, *, timeout: float | None = None) -> None:
        """Register with the coordinator at `host:port`; returns once it has accepted.

        Connecting twice is a `ConflictError`. Without an answer in time (by default `rescale_timeout_ms`,
        but at least ten seconds): `UnavailableError`. A wrong token, a taken name or a run that is over raise
        what they are.
        """
        with self._changed:
            if self._connection is not None:
                raise ConflictError(f"{self.worker_id.id} is connected already")
            if self._is_closed:
                raise ClosedError(f"{self.worker_id.id} was disconnected; make a new worker")
            self._connection = Connection(
                address,
                self._timeouts,
                hello=self._hello,
                receive=self._receive,
                lost=self._lost,
                beat=self._beat,
                token=self._token,
                tls=self._tls,
            )
        self._connection.start()
        patience = max(10.0, self._timeouts.pause) if timeout is None else timeout
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._was_welcomed or self._problem or self._ended, patience
            )
            problem = self._problem
        if problem is None and not done:
            problem = UnavailableError(
                f"no coordinator accepted {self.worker_id} at {address} within {patience:.1f} s"
            )
        if problem is not None:
            self.disconnect()
            raise problem

    def disconnect(self) -> None:
        """End the connection; disconnecting twice is fine.

        A member that did not `leave` or `finish` before leaves a gap that the cluster rescales around.
        """
        with self._changed:
            connection, self._connection = self._connection, None
            self._is_closed = self._is_closed or connection is not None
            if connection is not None:
                self._move(WorkerStatus.LEAVING)
            self._changed.notify_all()
        if connection is not None:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    # Rescaling

    def on_rescaling_event(self, event: RescalingEvent) -> None:
        """Handle a rescale: tell the listeners, then wait or go on.

        In synchronous mode, wait for the training code to call `ready` or `resume_training`, for at most
        `rescale_timeout_ms` (`DeadlineExceededError`). In asynchronous mode, adopt the new topology and return.
        """
        self._begin(event)
        try:
            if not self._config.use_synchronous_rescaling:
                return
            with self._changed:
                done = self._changed.wait_for(
                    lambda: self._is_answered or not self._is_rescaling, self._timeouts.barrier
                )
            if not done:
                raise DeadlineExceededError(
                    f"the training code was not ready for generation {event.new_topology.epoch} "
                    f"within {self._config.rescale_timeout_ms} ms"
                )
        finally:
            with self._changed:
                self._is_rescaling = False

    def wait_for_rescale(self, timeout: float | None = None) -> RescalingEvent | None:
        """The newest rescale that waits for this worker's `ready`; `None` if none came in time.

        A run that is over raises `TrainingAbortedError`; a lost membership raises what ended it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.pending_event or self._is_over(), timeout)
            self._raise_if_over()
            return self.pending_event

    def ready(
        self,
        generation: int,
        *,
        committed_step: int,
        prepared_step: int | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        """Answer the rescale barrier: training has stopped here, at `committed_step` (-1: none yet).

        `prepared_step`: the reduced gradient of that step is held, though it was not applied.
        `attributes` reach all members unchanged. An older generation than the newest announced one is ignored:
        the newest must be answered. The first answer for a generation counts: others may act on it already.
        """
        with self._changed:
            if self._announced is None or generation != self._announced.epoch or self._is_answered:
                return
            self._committed_step = committed_step
            self._is_answered = True
            self._formation = None
            self._topology = self._announced
            self._take_rank(self._announced)
            message = messages.Ready(
                incarnation=self._incarnation,
                generation=generation,
                committed_step=committed_step,
                prepared_step=prepared_step,
                attributes=dict(attributes or {}),
            )
            self._deliver("ready", message)

    def wait_for_formation(self, timeout: float | None = None) -> Formation | None:
        """The formation of the generation that was answered; `None` if it did not come in time.

        `StaleGenerationError`: a newer generation was announced, answer `ready` for it and wait again.
        `TrainingAbortedError`: the run is over. `ClosedError`: this worker was released or disconnected.
        """
        patience = self._timeouts.worker_patience if timeout is None else timeout
        with self._changed:
            self._changed.wait_for(
                lambda: self._formation or self.pending_event or self._is_over(), patience
            )
            self._raise_if_over()
            if self._formation is not None:
                return self._formation
            if self.pending_event is not None:
                raise StaleGenerationError(
                    f"generation {self.pending_event.new_topology.epoch} waits for an answer"
                )
            return None

    def formed(self, generation: int, moved: Mapping[str, int] | None = None) -> None:
        """Tell that this worker is in the new group and healed; `moved` says what it received."""
        with self._changed:
            if self._announced is None or generation != self._announced.epoch:
                return
            self._is_rescaling = False
            self._move(WorkerStatus.ACTIVE)
            message = messages.Formed(
                incarnation=self._incarnation, generation=generation, moved=dict(moved or {})
            )
            self._deliver("formed", message)
            self._changed.notify_all()

    def resume_training(self) -> None:
        """Go on after a rescale; nothing happens without one."""
        with self._changed:
            if not self._is_rescaling:
                return
            self._is_rescaling = False
            self._move(WorkerStatus.ACTIVE)
            self._changed.notify_all()

    def update_topology(self, topology: ClusterTopology) -> None:
        """Adopt a later topology; an older generation is a `StaleGenerationError`."""
        with self._changed:
            current = self._topology
            if current is not None and topology.epoch < current.epoch:
                raise StaleGenerationError(
                    f"generation {topology.epoch} is older than {current.epoch}, the current one"
                )
            self._topology = topology
            self._take_rank(topology)
            self._changed.notify_all()

    # Training state

    def synchronize_state(self, state: GlobalTrainingState) -> None:
        """Apply optimizer state, learning rate and counters through the hooks, then tell listeners.

        If a hook raises, the current state stays what it was.
        """
        if state.optimizer_state is not None:
            self._hooks.load_optimizer_state(state.optimizer_state)
        self._hooks.set_learning_rate(state.learning_rate)
        self._hooks.set_counters(state.current_epoch, state.current_step)
        with self._changed:
            self._state = state
        _tell(self.state_synchronized, state)

    def update_training_state(self, epoch: int, step: int, learning_rate: float) -> None:
        """Note where training stands now and let the coordinator know."""
        with self._changed:
            topology = self._topology
            state = self._state or GlobalTrainingState(
                current_epoch=0,
                current_step=0,
                learning_rate=0.0,
                global_batch_size=0,
                active_worker_count=0,
            )
            self._state = replace(
                state,
                current_epoch=epoch,
                current_step=step,
                learning_rate=learning_rate,
                active_worker_count=0 if topology is None else topology.world_size,
                state_timestamp=datetime.now(UTC),
            )
            if topology is not None:
                self.report_progress(topology.epoch, epoch, step, learning_rate)

    def report_progress(
        self,
        generation: int,
        epoch: int,
        step: int,
        learning_rate: float,
        samples: int = 0,
        metrics: Mapping[str, float] | None = None,
        *,
        global_batch_size: int = 0,
    ) -> None:
        """Report a committed step. Cheap; only the newest one of an interval is sent."""
        progress = messages.Progress(
            incarnation=self._incarnation,
            generation=generation,
            epoch=epoch,
            step=step,
            learning_rate=learning_rate,
            samples=samples,
            global_batch_size=global_batch_size,
            metrics=dict(metrics or {}),
        )
        with self._changed:
            is_first = self._standing.get("reported") != generation
            self._standing["reported"] = generation
            self._committed_step = max(self._committed_step, step)
            self._progress = progress
            if is_first and self._connection is not None:
                self._connection.wake()

    def should_handle_shard(self, shard_index: int, total_shards: int) -> bool:
        """Whether a shard is this worker's: by the last redistribution plan, else dealt by rank."""
        if total_shards < 1 or not 0 <= shard_index < total_shards:
            raise InvalidInputError(
                f"shard_index = {shard_index}, total_shards = {total_shards}: "
                "the index must lie between 0 and the number of shards"
            )
        with self._changed:
            if self._topology is None or self._metadata.rank < 0:
                return False
            if self._assigned is not None and self._assigned[0] == total_shards:
                return shard_index in self._assigned[1]
            return shard_index % self._topology.world_size == self._metadata.rank

    def redistribute_data(self, plan: RedistributionPlan) -> None:
        """Carry out this worker's part of a plan, then answer `should_handle_shard` by it.

        The plan must assign something to this worker, be it nothing at all: a plan for others is an error.
        """
        if self._data_executor is None:
            raise ConflictError("no data_executor was given to this worker; it cannot move data")
        if self.worker_id not in plan.worker_assignments:
            raise InvalidInputError(f"the plan does not mention {self.worker_id}")
        self._data_executor(plan)
        mine = frozenset(shard.shard_id for shard in plan.worker_assignments[self.worker_id])
        with self._changed:
            self._assigned = (plan.total_shards, mine)

    # Going

    def suspect(self, generation: int, worker_id: WorkerId | None, reason: str) -> None:
        """Report that a collective failed although nobody was announced as lost."""
        with self._changed:
            if self._announced is None or generation != self._announced.epoch:
                return
            message = messages.Suspect(
                incarnation=self._incarnation,
                generation=generation,
                worker_id=None if worker_id is None else worker_id.id,
                reason=reason[:20_000],
            )
            self._deliver("suspect", message)

    def leave(self, reason: str = "") -> None:
        """Ask to go after the step in hand; `wait_for_release` tells when the others can do without."""
        with self._changed:
            self._is_leaving = True
            self._move(WorkerStatus.LEAVING)
            self._deliver("leave", self._farewell(messages.Leave, reason))

    def wait_for_release(self, timeout: float | None = None) -> bool:
        """Wait until the others need this worker no more; `False` if that did not come in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._released is not None or self._is_over(), timeout)
            return self._released is not None or self._is_over()

    def finish(self, reason: str = "") -> None:
        """Tell that training is complete here."""
        with self._changed:
            self._deliver("finish", self._farewell(messages.Finish, reason))

    def abort(self, reason: str, traceback: str = "", *, fatal: bool = False) -> None:
        """Tell that the training code raised; `fatal` ends the run for everybody."""
        with self._changed:
            message = messages.Abort(
                incarnation=self._incarnation,
                generation=self._generation() or 0,
                reason=reason[:20_000],
                traceback=traceback[-20_000:],
                fatal=fatal,
            )
            self._deliver("abort", message)

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until a heartbeat that follows everything said so far was answered.

        For the last words before the process ends; `False` if the coordinator did not answer in time.
        """
        with self._changed:
            if self._connection is None:
                return False
            target = self._sequence + 1
            self._connection.wake()
            return self._changed.wait_for(
                lambda: self._answered_sequence >= target or self._is_over(), timeout
            )

    _answered_sequence = 0

    def _farewell(self, kind: Any, reason: str) -> Any:
        if self._progress is not None:
            self._deliver("progress", self._progress)
            self._progress = None
        return kind(
            incarnation=self._incarnation,
            generation=self._generation() or 0,
            reason=reason[:20_000],
        )

    # On the connection's threads

    def _hello(self) -> messages.Hello:
        with self._changed:
            return messages.Hello(
                protocol=messages.PROTOCOL,
                worker=self.worker_id,
                incarnation=self._incarnation,
                generation=self._generation(),
                local_world_size=self._metadata.local_world_size,
                attributes=dict(self._metadata.custom_attributes),
            )

    def _generation(self) -> int | None:
        return None if self._announced is None else self._announced.epoch

    def _receive(self, message: messages.FromCoordinator) -> None:
        if isinstance(message, messages.Pong):
            with self._changed:
                self._answered_sequence = max(self._answered_sequence, message.sequence)
                self._changed.notify_all()
        elif isinstance(message, messages.Welcome):
            self._welcomed(message)
        elif isinstance(message, messages.Rescale):
            self._rescale(message)
        elif isinstance(message, messages.FormationNotice):
            self._form(message)
        elif isinstance(message, messages.Released):
            self._go(message.reason)
        elif isinstance(message, messages.Ended):
            self._end(message)
        elif isinstance(message, messages.Refused):
            self._refused(message)
        else:
            log.info("%s: %s", self.worker_id.id, message.reason)

    def _welcomed(self, message: messages.Welcome) -> None:
        with self._changed:
            self._was_welcomed = True
            if message.workers is not None:
                # Adopted again, in the generation that it trained in all the while.
                for name in ("ready", "formed", "suspect"):
                    self._send_again(name)
            for name in ("leave", "finish", "abort"):
                self._send_again(name)
            if self._progress is None and self._standing.get("progress") is not None:
                self._progress = self._standing["progress"]
            self._changed.notify_all()

    def _rescale(self, message: messages.Rescale) -> None:
        with self._changed:
            old = self._announced or _NOTHING
            if message.generation <= old.epoch:
                return
            if message.workers is not None:
                workers = message.workers
            elif message.change is not None and old.epoch == message.old_generation:
                workers = messages.apply_change(old.workers, message.change)
            else:
                log.warning("generation %d does not follow %d", message.generation, old.epoch)
                return
            at = message.decided_at
            new = ClusterTopology(workers=workers, epoch=message.generation, last_updated=at)
            event = RescalingEvent.between(old, new, message.reason, urgent=message.urgent, at=at)
            self._announced = new
            for name in ("ready", "formed", "suspect"):
                self._standing.pop(name, None)
            self._formation = None
            self._is_leaving = self._is_leaving or self.worker_id not in new
        self._begin(event)
        if self._answers_by_itself and not self._is_leaving:
            self.ready(new.epoch, committed_step=self._committed_step)

    def _begin(self, event: RescalingEvent) -> None:
        with self._changed:
            self._is_rescaling = True
            self._is_answered = False
            self._event = event
            self._move(WorkerStatus.RESCALING)
            if not self._config.use_synchronous_rescaling:
                self.update_topology(event.new_topology)
            self._changed.notify_all()
        _tell(self.rescaling_requested, event)

    def _form(self, message: messages.FormationNotice) -> None:
        with self._changed:
            topology = self._announced
            if topology is None or message.generation != topology.epoch:
                return
            names = (worker.id for worker in topology.workers)
            self._formation = Formation(
                generation=message.generation,
                topology=topology,
                members=dict(zip(names, message.reports, strict=True)),
                target_step=message.target_step,
            )
            self._changed.notify_all()
        if self._answers_by_itself:
            self.formed(message.generation)

    def _go(self, reason: str) -> None:
        with self._changed:
            self._is_leaving = True
            self._released = reason
            self._changed.notify_all()
        self._retire()

    def _end(self, message: messages.Ended) -> None:
        with self._changed:
            self._ended = message
            self._changed.notify_all()
        _tell(self.run_ended, message.reason)
        self._retire()

    def _retire(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.retire()

    def _refused(self, message: messages.Refused) -> None:
        log.warning("%s was refused (%s): %s", self.worker_id.id, message.code, message.reason)
        if message.code == messages.REFUSED_FENCED:
            self._rejoin(message.reason)
        elif message.code != messages.REFUSED_DUPLICATE or not self._was_welcomed:
            # A taken name is worth waiting for only after this worker has owned it.
            self._lost(ConflictError(message.reason))
            self._retire()

    def _rejoin(self, reason: str) -> None:
        with self._changed:
            if self._is_leaving or "finish" in self._standing or "abort" in self._standing:
                self._go(reason)
                return
            self._incarnation = uuid.uuid4().hex
            self._standing.clear()
            self._announced = self._formation = self._event = self._progress = None
            self._is_answered = False
            self._metadata = replace(self._metadata, status=WorkerStatus.JOINING, rank=-1)
            self._changed.notify_all()
        _tell(self.fenced, reason)
        connection = self._connection
        if connection is not None:
            connection.restart_stream()

    def _lost(self, problem: TensorForgeError | None) -> None:
        with self._changed:
            if problem is not None:
                self._problem = problem
            self._changed.notify_all()

    def _beat(self) -> list[messages.FromWorker]:
        with self._changed:
            if not self._was_welcomed:
                return []
            self._sequence += 1
            self._metadata = replace(self._metadata, last_heartbeat=datetime.now(UTC))
            beat = messages.Heartbeat(
                incarnation=self._incarnation,
                generation=self._generation() or 0,
                sequence=self._sequence,
            )
            progress, self._progress = self._progress, None
            if progress is None:
                return [beat]
            self._standing["progress"] = progress
            return [progress, beat]

    # Small things

    def _deliver(self, name: str, message: Any) -> None:
        self._standing[name] = message
        if self._connection is not None and self._was_welcomed:
            self._connection.send(message)

    def _send_again(self, name: str) -> None:
        message = self._standing.get(name)
        if message is not None and self._connection is not None:
            self._connection.send(message)

    def _is_over(self) -> bool:
        return bool(
            self._ended is not None
            or self._released is not None
            or self._problem is not None
            or self._is_closed
        )

    def _raise_if_over(self) -> None:
        if self._ended is not None:
            ended = self._ended
            raise TrainingAbortedError(
                ended.reason, outcome=ended.outcome, emergency=ended.emergency
            )
        if self._problem is not None:
            raise self._problem
        if self._released is not None:
            raise ClosedError(f"{self.worker_id.id} was released: {self._released}")
        if self._is_closed:
            raise ClosedError(f"{self.worker_id.id} is disconnected")

    def _move(self, status: WorkerStatus) -> None:
        current = self._metadata.status
        if WORKER_LIFECYCLE.can_transition(current, status):
            self._metadata = replace(self._metadata, status=status)

    def _take_rank(self, topology: ClusterTopology) -> None:
        rank = topology.rank_of(self.worker_id) if self.worker_id in topology else -1
        self._metadata = replace(self._metadata, rank=rank)


def _tell(listeners: Iterable[Callable[[Any], object]], value: object) -> None:
    """Call every listener; one that raises does not keep the others from being told."""
    for listener in tuple(listeners):
        try:
            listener(value)
        except Exception:
            log.exception("a callback raised")
