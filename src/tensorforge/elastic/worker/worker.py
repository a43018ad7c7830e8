"""The worker that training code uses: a membership with training state and data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.cluster.global_state import GlobalTrainingState
from tensorforge.cluster.goal import Goal
from tensorforge.cluster.rescaling import RescalingEvent
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WorkerId
from tensorforge.elastic.protocol.access import TlsOptions
from tensorforge.elastic.worker.hooks import RedistributionPlan, StateHooks
from tensorforge.elastic.worker.inbox import call_all
from tensorforge.elastic.worker.member import ClusterMember
from tensorforge.errors import ConflictError, DeadlineExceededError, InvalidInputError


class ElasticWorker(ClusterMember):
    """A worker that joins a training cluster.

    Callbacks are lists of functions that run on the stream thread and must not block:

    - `rescaling_requested(event)`: a new generation was decided; if `event.urgent`, abort collectives now.
    - `state_synchronized(state)`: `synchronize_state` has applied a state.
    - `fenced(reason)`: the cluster went on without this process; it joins again as a newcomer by itself.
    - `run_ended(reason)`: the run is over for all workers.

    In a rescale, training code stops (at once if urgent, else after the current step), calls `ready` and
    `wait_for_formation`, forms the new group, heals, and calls `formed`. With `use_synchronous_rescaling=False`
    (or `answers_by_itself`) the worker answers by itself, for training code that never needs to stop.
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
        hooks: StateHooks | None = None,
        data_executor: Callable[[RedistributionPlan], object] | None = None,
    ) -> None:
        super().__init__(
            worker_id,
            config,
            token=token,
            tls=tls,
            attributes=attributes,
            local_world_size=local_world_size,
            answers_by_itself=answers_by_itself,
            terms=terms,
            goal=goal,
        )
        self._hooks = hooks or StateHooks()
        self._data_executor = data_executor

    # Rescaling without a coordinator

    def on_rescaling_event(self, event: RescalingEvent) -> None:
        """Handle a rescale: call the listeners, then wait or go on.

        In synchronous mode, wait until training code calls `ready` or `resume_training`; longer than
        `rescale_timeout_ms` is a `DeadlineExceededError`. In asynchronous mode, adopt the new topology.
        """
        self._begin(event)
        try:
            if not self._config.use_synchronous_rescaling:
                return
            with self._changed:
                done = self._changed.wait_for(
                    lambda: self._state.is_answered or not self._state.is_rescaling,
                    self._timeouts.barrier,
                )
            if not done:
                raise DeadlineExceededError(
                    f"the training code was not ready for generation {event.new_topology.epoch} "
                    f"within {self._config.rescale_timeout_ms} ms"
                )
        finally:
            with self._changed:
                self._state.is_rescaling = False

    def resume_training(self) -> None:
        """Go on after a rescale; without a rescale this does nothing."""
        with self._changed:
            if self._state.is_rescaling:
                self._state.resume()
                self._changed.notify_all()

    def update_topology(self, topology: ClusterTopology) -> None:
        """Adopt a later topology; an older generation is a `StaleGenerationError`."""
        with self._changed:
            self._state.adopt(topology)
            self._changed.notify_all()

    # Training state

    @property
    def current_state(self) -> GlobalTrainingState | None:
        """The training state that was synchronized or updated last."""
        return self._state.training

    def synchronize_state(self, state: GlobalTrainingState) -> None:
        """Apply optimizer state, learning rate and counters through the hooks, then call the listeners.

        If a hook raises, `current_state` does not change.
        """
        if state.optimizer_state is not None:
            self._hooks.load_optimizer_state(state.optimizer_state)
        self._hooks.set_learning_rate(state.learning_rate)
        self._hooks.set_counters(state.current_epoch, state.current_step)
        with self._changed:
            self._state.training = state
        call_all(self.state_synchronized, state)

    def update_training_state(self, epoch: int, step: int, learning_rate: float) -> None:
        """Set the counters and the learning rate, and report the step to the coordinator."""
        with self._changed:
            topology = self._state.topology
            state = self._state.training or GlobalTrainingState(
                current_epoch=0,
                current_step=0,
                learning_rate=0.0,
                global_batch_size=0,
                active_worker_count=0,
            )
            self._state.training = replace(
                state,
                current_epoch=epoch,
                current_step=step,
                learning_rate=learning_rate,
                active_worker_count=0 if topology is None else topology.world_size,
                state_timestamp=datetime.now(UTC),
            )
            if topology is not None:
                self.report_progress(topology.epoch, epoch, step, learning_rate)

    # Data

    def should_handle_shard(self, shard_index: int, total_shards: int) -> bool:
        """Whether this worker owns a shard: by the last redistribution plan, else by rank."""
        if total_shards < 1 or not 0 <= shard_index < total_shards:
            raise InvalidInputError(
                f"shard_index = {shard_index}, total_shards = {total_shards}: "
                "the index must lie between 0 and the number of shards"
            )
        with self._changed:
            state = self._state
            if state.topology is None or state.metadata.rank < 0:
                return False
            if state.assigned is not None and state.assigned[0] == total_shards:
                return shard_index in state.assigned[1]
            return shard_index % state.topology.world_size == state.metadata.rank

    def redistribute_data(self, plan: RedistributionPlan) -> None:
        """Carry out this worker's part of a plan; afterwards `should_handle_shard` follows the plan.

        A plan in which this worker does not occur is an error; one that assigns no shard to it is fine.
        """
        if self._data_executor is None:
            raise ConflictError("no data_executor was given to this worker; it cannot move data")
        if self.worker_id not in plan.worker_assignments:
            raise InvalidInputError(f"the plan does not mention {self.worker_id}")
        self._data_executor(plan)
        mine = frozenset(shard.shard_id for shard in plan.worker_assignments[self.worker_id])
        with self._changed:
            self._state.assigned = (plan.total_shards, mine)
