"""A process as a member of a cluster: it connects, answers barriers, reports progress and leaves."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Self

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.cluster.goal import Goal
from tensorforge.cluster.rescaling import RescalingEvent
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WorkerId, WorkerMetadata, WorkerStatus
from tensorforge.elastic.protocol import messages
from tensorforge.elastic.protocol.access import TlsOptions
from tensorforge.elastic.protocol.messages import Formation
from tensorforge.elastic.protocol.timeouts import Timeouts
from tensorforge.elastic.worker.connection import Connection
from tensorforge.elastic.worker.inbox import Callbacks, Inbox, call_all
from tensorforge.elastic.worker.resend_buffer import ResendBuffer
from tensorforge.elastic.worker.worker_state import WorkerState
from tensorforge.errors import (
    ClosedError,
    ConflictError,
    StaleGenerationError,
    UnavailableError,
)
from tensorforge.processes import ProcessIdentity

_MOST_TEXT = 20_000


class ClusterMember:
    """One process's membership in a cluster.

    `connect_to_cluster` registers with the coordinator. From then on two threads keep the connection, also
    while the coordinator is away. Calls that report something return at once; their messages are sent again
    after a reconnection. `rescaling_requested`, `state_synchronized`, `fenced` and `run_ended` are lists of
    callbacks. `terms` and `goal` must be the same on all workers of a run; the coordinator refuses a worker
    with other ones. The configuration is the run's, too: the coordinator sends it, and refuses a worker that
    was given another `config`.
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
        terms: Mapping[str, str] | None = None,
        goal: Goal | None = None,
    ) -> None:
        self._terms, self._goal = dict(terms or {}), goal
        self._given_config = config
        self._asked_to_answer = answers_by_itself
        self._use_config(config or ElasticTrainingConfig())
        self._token, self._tls = token, tls
        now = datetime.now(UTC)
        process = ProcessIdentity.current()
        told = {"pid": str(process.pid), "process": process.to_text()}
        metadata = WorkerMetadata(
            worker_id=worker_id,
            status=WorkerStatus.JOINING,
            join_time=now,
            last_heartbeat=now,
            local_world_size=local_world_size,
            custom_attributes=told | dict(attributes or {}),
        )
        self._changed = threading.Condition(threading.RLock())
        self._state = WorkerState(metadata, uuid.uuid4().hex)
        self._connection: Connection | None = None
        self._resend_buffer = ResendBuffer(self._send)
        self._callbacks = Callbacks()
        self.rescaling_requested = self._callbacks.rescaling_requested
        self.state_synchronized = self._callbacks.state_synchronized
        self.fenced = self._callbacks.fenced
        self.run_ended = self._callbacks.run_ended
        self._inbox = Inbox(
            self._state,
            self._resend_buffer,
            self._changed,
            self._callbacks,
            announced=self._announced,
            gathered=self._gathered,
            retire=self._retire,
            rejoin=self._rejoin,
            configure=self._configure,
        )

    def _use_config(self, config: ElasticTrainingConfig) -> None:
        config.validate()
        self._config = config
        self._timeouts = Timeouts.derive(config)
        synchronous, asked = config.use_synchronous_rescaling, self._asked_to_answer
        self._answers_by_itself = not synchronous if asked is None else asked

    # Identity and membership

    @property
    def config(self) -> ElasticTrainingConfig:
        """The run's configuration, as the coordinator sent it; before that, what this worker was given."""
        return self._config

    @property
    def worker_id(self) -> WorkerId:
        """This worker's name and address."""
        return self._state.worker_id

    @property
    def incarnation(self) -> str:
        """Which process of that name this is; it changes when the worker is fenced."""
        return self._state.incarnation

    @property
    def current_topology(self) -> ClusterTopology | None:
        """The topology that this worker answered the barrier for last."""
        return self._state.topology

    @property
    def is_rescaling(self) -> bool:
        """Whether a rescale was announced and this worker has not formed yet."""
        return self._state.is_rescaling

    @property
    def is_connected(self) -> bool:
        """Whether `connect_to_cluster` succeeded and `disconnect` was not called."""
        return self._connection is not None

    @property
    def is_leaving(self) -> bool:
        """Whether this worker asked, or was asked, to leave."""
        return self._state.is_leaving

    @property
    def pending_event(self) -> RescalingEvent | None:
        """The newest rescale that was announced and not answered yet."""
        with self._changed:
            return self._state.pending_event

    def metadata(self) -> WorkerMetadata:
        """A copy of this worker's description at this moment."""
        with self._changed:
            return replace(self._state.metadata)

    def agree_to(self, terms: Mapping[str, str], goal: Goal | None) -> None:
        """Set the terms and the goal that this worker names to the coordinator; call it before connecting."""
        with self._changed:
            self._terms, self._goal = dict(terms), goal

    # Connecting

    def connect_to_cluster(self, address: str, *, timeout: float | None = None) -> None:
        """Register with the coordinator at `host:port`; returns once the coordinator has accepted.

        Connecting twice raises `ConflictError`, no answer in time `UnavailableError` (the default is
        `rescale_timeout_ms`, but at least ten seconds). A wrong token, a name that is taken or a run that is
        over raises its own error.
        """
        with self._changed:
            if self._connection is not None:
                raise ConflictError(f"{self.worker_id.id} is connected already")
            if self._state.is_closed:
                raise ClosedError(f"{self.worker_id.id} was disconnected; make a new worker")
            self._connection = Connection(
                address,
                self._timeouts,
                hello=self._hello,
                receive=self._inbox.receive,
                lost=self._inbox.lost,
                beat=self._beat,
                token=self._token,
                tls=self._tls,
            )
        self._connection.start()
        patience = max(10.0, self._timeouts.pause) if timeout is None else timeout
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._state.was_welcomed or self._state.problem or self._state.ended,
                patience,
            )
            problem = self._state.problem
        if problem is None and not done:
            problem = UnavailableError(
                f"no coordinator accepted {self.worker_id} at {address} within {patience:.1f} s"
            )
        if problem is not None:
            self.disconnect()
            raise problem

    def disconnect(self) -> None:
        """End the connection; a second call does nothing.

        A member that did not `leave` or `finish` before is lost for the cluster, which rescales without it.
        """
        with self._changed:
            connection, self._connection = self._connection, None
            if connection is not None:
                self._state.is_closed = True
                self._state.move(WorkerStatus.LEAVING)
            self._changed.notify_all()
        if connection is not None:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    # Rescaling

    def wait_for_rescale(self, timeout: float | None = None) -> RescalingEvent | None:
        """The newest rescale that this worker has not answered with `ready`; `None` if none came in time.

        A run that is over raises `TrainingAbortedError`; a membership that has ended raises its reason.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.pending_event or self._state.is_over, timeout)
            self._state.raise_if_over()
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

        `prepared_step`: this worker has the reduced gradient of that step, but has not applied it.
        `attributes` are given to all members. Only the newest announced generation can be answered, and
        only its first answer counts, because other members may have acted on it.
        """
        with self._changed:
            if self._state.answer(generation, committed_step):
                message = messages.Ready(
                    incarnation=self._state.incarnation,
                    generation=generation,
                    committed_step=committed_step,
                    prepared_step=prepared_step,
                    last_generation=self._state.last_formed,
                    attributes=dict(attributes or {}),
                )
                self._resend_buffer.send(message)

    def wait_for_formation(self, timeout: float | None = None) -> Formation | None:
        """The formation of the generation that was answered; `None` if it did not come in time.

        `StaleGenerationError`: a newer generation was announced; answer it with `ready` and wait again.
        `TrainingAbortedError`: the run is over. `ClosedError`: this worker was released or disconnected.
        """
        patience = self._timeouts.worker_patience if timeout is None else timeout
        with self._changed:
            self._changed.wait_for(
                lambda: self._state.formation or self.pending_event or self._state.is_over, patience
            )
            self._state.raise_if_over()
            if self._state.formation is not None:
                return self._state.formation
            if self.pending_event is not None:
                raise StaleGenerationError(
                    f"generation {self.pending_event.new_topology.epoch} was announced; answer it first"
                )
            return None

    def formed(self, generation: int, moved: Mapping[str, int] | None = None) -> None:
        """Report that this worker has formed the new group and is healed; `moved` is what it received."""
        with self._changed:
            if generation != self._state.generation:
                return
            self._state.resume()
            self._state.last_formed = generation
            message = messages.Formed(
                incarnation=self._state.incarnation,
                generation=generation,
                moved=dict(moved or {}),
            )
            self._resend_buffer.send(message)
            self._changed.notify_all()

    # Progress

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
        """Report a committed step. Only the newest step of each heartbeat interval is sent."""
        with self._changed:
            progress = messages.Progress(
                incarnation=self._state.incarnation,
                generation=generation,
                epoch=epoch,
                step=step,
                learning_rate=learning_rate,
                samples=samples,
                global_batch_size=global_batch_size,
                metrics=dict(metrics or {}),
            )
            self._state.committed_step = max(self._state.committed_step, step)
            is_first = self._resend_buffer.report(progress)
            if is_first and self._connection is not None:
                self._connection.wake()

    # Leaving

    def suspect(self, generation: int, worker_id: WorkerId | None, reason: str) -> None:
        """Report that a collective failed although no member was announced as lost."""
        with self._changed:
            if generation != self._state.generation:
                return
            message = messages.Suspect(
                incarnation=self._state.incarnation,
                generation=generation,
                worker_id=None if worker_id is None else worker_id.id,
                reason=reason[:_MOST_TEXT],
            )
            self._resend_buffer.send(message)

    def leave(
        self, reason: str = "", *, together: bool = False, stops_if_last: bool = False
    ) -> None:
        """Ask to leave after the current step; then call `wait_for_release`.

        `together`: all members of the generation leave after the same step. `stops_if_last`: if nobody can take
        over the state of this worker, `leave_refused` says so, and the training code stops the run instead.
        """
        with self._changed:
            self._state.is_leaving = True
            self._state.move(WorkerStatus.LEAVING)
            message = messages.Leave(
                incarnation=self._state.incarnation,
                generation=self._state.generation or 0,
                reason=reason[:_MOST_TEXT],
                together=together,
                stops_if_last=stops_if_last,
            )
            self._send_last(message)

    @property
    def leave_refused(self) -> str | None:
        """Why the coordinator did not let this worker leave; `None` if it did or was not asked."""
        return self._state.leave_refused

    def wait_for_release(self, timeout: float | None = None) -> bool:
        """Wait until the other members do not need this worker any more; `False` if that took too long.

        Call it when training has stopped here; the coordinator is told so.
        """

        def is_over() -> bool:
            # Every generation that follows needs its own answer; one for an older generation is ignored.
            announced = self._state.announced
            if announced is not None and self.worker_id not in announced:
                self.ready(announced.epoch, committed_step=self._state.committed_step)
            return self._state.is_over

        with self._changed:
            return self._changed.wait_for(is_over, timeout)

    def finish(
        self, reason: str = "", *, committed_step: int | None = None, epoch: int = 0
    ) -> None:
        """Report that training is over here, after `committed_step` (by default the newest reported one).

        `epoch` is the one that the next step would have.
        """
        with self._changed:
            step = self._state.committed_step if committed_step is None else committed_step
            message = messages.Finish(
                incarnation=self._state.incarnation,
                generation=self._state.generation or 0,
                committed_step=step,
                epoch=epoch,
                reason=reason[:_MOST_TEXT],
            )
            self._send_last(message)

    def abort(self, reason: str, traceback: str = "", *, fatal: bool = False) -> None:
        """Report that the training code raised; `fatal` ends the run for all workers."""
        with self._changed:
            message = messages.Abort(
                incarnation=self._state.incarnation,
                generation=self._state.generation or 0,
                reason=reason[:_MOST_TEXT],
                traceback=traceback[-_MOST_TEXT:],
                fatal=fatal,
            )
            self._resend_buffer.send(message)

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until the coordinator has everything that was sent so far; `False` if that took too long.

        Call it before the process ends. It waits for the answer to a heartbeat that is sent last.
        """
        with self._changed:
            if self._connection is None:
                return False
            target = self._resend_buffer.sequence + 1
            self._connection.wake()
            return self._changed.wait_for(
                lambda: self._resend_buffer.answered_sequence >= target or self._state.is_over,
                timeout,
            )

    def _send_last(self, message: messages.Leave | messages.Finish) -> None:
        self._resend_buffer.flush_progress()
        self._resend_buffer.send(message)

    # On the connection's threads

    def _hello(self) -> messages.Hello:
        with self._changed:
            self._state.is_welcomed = False
            metadata = self._state.metadata
            return messages.Hello(
                protocol=messages.PROTOCOL,
                worker=metadata.worker_id,
                incarnation=self._state.incarnation,
                generation=self._state.generation,
                previous=self._state.previous,
                attributes=dict(metadata.custom_attributes),
                terms=self._terms,
                goal=self._goal,
                config=self._given_config,
            )

    def _beat(self) -> list[messages.FromWorker]:
        with self._changed:
            state = self._state
            if not state.is_welcomed:
                return []
            state.metadata = replace(state.metadata, last_heartbeat=datetime.now(UTC))
            return self._resend_buffer.beat(state.incarnation, state.generation or 0)

    def _send(self, message: messages.FromWorker) -> None:
        if self._connection is not None and self._state.is_welcomed:
            self._connection.send(message)

    def _announced(self, event: RescalingEvent) -> None:
        self._begin(event)
        if self._answers_by_itself and not self._state.is_leaving:
            self.ready(event.new_topology.epoch, committed_step=self._state.committed_step)

    def _begin(self, event: RescalingEvent) -> None:
        with self._changed:
            self._state.begin(event)
            if not self._config.use_synchronous_rescaling:
                self._state.adopt(event.new_topology)
            self._changed.notify_all()
        call_all(self.rescaling_requested, event)

    def _gathered(self, generation: int) -> None:
        if self._answers_by_itself:
            self.formed(generation)

    def _configure(self, config: ElasticTrainingConfig) -> None:
        self._use_config(config)
        if self._connection is not None:
            self._connection.timeouts = self._timeouts

    def _retire(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.retire()

    def _rejoin(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.restart_stream()
