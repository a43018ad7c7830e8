"""The run: what a training script makes, and the loop that carries it through every change of the cluster."""

from __future__ import annotations

import logging
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from tensorforge.catalog import CheckpointType
from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.errors import (
    ClosedError,
    ConfigurationError,
    ConflictError,
    InvalidInputError,
    TrainingAbortedError,
)
from tensorforge.train.data.batch_loading import BatchSource, Collate, Piece, dataset_size
from tensorforge.train.data.loading_processes import Loading, LoadingProcesses
from tensorforge.train.data.local_shards import LocalShards
from tensorforge.train.data.shard_plane import ShardPlane
from tensorforge.train.evaluation import Evaluation
from tensorforge.train.gradients.shard_gradients import EntryReady
from tensorforge.train.group.agreement import agree
from tensorforge.train.group.gloo_group import GenerationGroup, GroupAbortedError
from tensorforge.train.group.membership import FixedMembership, Membership, RunEnd
from tensorforge.train.group.session import FormationTimes, Position, Session, Standing
from tensorforge.train.loop.engine import StepEngine, Wishes
from tensorforge.train.loop.step import Step
from tensorforge.train.loop.training_state import Prepared, Stateful, TrainingState
from tensorforge.train.run_checkpoints import Checkpointer, CheckpointPlan
from tensorforge.train.run_config import RunConfig
from tensorforge.train.run_log import RunLog
from tensorforge.train.signals import SignalHandlers

log = logging.getLogger(__name__)


class Run:
    """Elastic training of one model.

        with Run(model, optimizer, dataset, RunConfig(batch_size=48)) as run:
            for step in run.steps(epochs=3):
                for x, y in step.batches():
                    step.backward(loss_function(model(x), y))
                step.commit()

    Started alone it is a run of one process; started by `tensorforge run` or `tensorforge worker` it is one
    worker of an elastic run. Every worker runs the same script. While `steps` is under way in the main thread,
    SIGTERM takes this worker out after its step, and SIGUSR2 stops the run on all workers.

    `before_update` is called with the step's complete gradient in place, before the optimizer: whatever it
    does must depend on the model alone.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        config: RunConfig,
        *,
        scheduler: Stateful | None = None,
        collate_fn: Collate | None = None,
        loading: Loading | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        before_update: Callable[[], None] | None = None,
        evaluation: Evaluation | None = None,
        checkpoints: CheckpointPlan | None = None,
        membership: Membership | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self._loading = loading or Loading()
        self._batches: BatchSource | LoadingProcesses = BatchSource(dataset, config, collate_fn)
        self.state = TrainingState(
            model,
            optimizer,
            dataset_size(dataset),
            config,
            scheduler=scheduler,
            stateful=stateful,
            before_update=before_update,
        )
        self._plane = _plane(dataset, config, self._loading)
        self._membership = membership if membership is not None else default_membership(self._plane)
        self._session = Session(self._membership)
        self._engine = StepEngine(self.state, self._session, self._plane)
        self._evaluation = evaluation
        self._checkpointer = None if checkpoints is None else Checkpointer(checkpoints)
        self._last_metrics: dict[str, float] = {}
        self._stop_reason: str | None = None
        self._leave_reason: str | None = None
        self._asked_to_leave = False
        self._stopping = False
        self._last_generation = 0
        self._log = RunLog.from_environment(self._membership.worker_id.id)
        self._signals = SignalHandlers(
            {
                signal.SIGTERM: lambda: self.leave("SIGTERM"),
                signal.SIGUSR2: lambda: self.stop("SIGUSR2"),
            }
        )
        self._is_open = False
        self._is_emergency_saved = False
        self._digest = ""
        self.outcome: str | None = None
        """How the run ended here: `"complete"`, `"stopped"` or `"left"`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        early = self._left_early() if error is None else None
        error = error or early
        if error is not None and self._is_open and not isinstance(error, TrainingAbortedError):
            text = "".join(traceback.format_exception(kind, error, trace))
            self._membership.abort(f"{type(error).__name__}: {error}", text)
        self.close()
        if early is not None:
            raise early

    def _left_early(self) -> ConflictError | None:
        """What is wrong with a loop that others still wait in; alone, everybody may go when they like."""
        is_alone = isinstance(self._membership, FixedMembership) and self.world_size == 1
        if is_alone or not self._is_open:
            return None
        return ConflictError(
            f"the loop over run.steps() was left after step {self.state.committed_step}, before its end; "
            "to end a run early call run.stop() and let the loop go on: it ends on all workers together"
        )

    def close(self) -> None:
        """Leave the cluster. Doing it again changes nothing."""
        if self._is_open:
            self._is_open = False
            self._engine.abandon_exchange()
            self._session.close()
            self._signals.remove()
        self._batches.close()
        if self._plane is not None:
            self._plane.close()
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._log.close()

    @property
    def rank(self) -> int:
        """This worker's rank in the current generation."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """How many workers the current generation has."""
        return self._session.world_size

    @property
    def generation(self) -> int:
        """The current generation."""
        return self._session.generation

    @property
    def interrupted(self) -> bool:
        """Whether the current attempt at a step is lost because the cluster changed."""
        return self._session.interrupted

    @property
    def rescales(self) -> list[FormationTimes]:
        """Every formation that this worker took part in, with the milliseconds of its phases."""
        return list(self._session.times)

    def digest(self) -> str:
        """128 bits over the whole state: weights, optimizer, scheduler, ledger."""
        return self.state.capture().digest().hex()

    def stop(self, reason: str = "asked to stop") -> None:
        """Stop the run on all workers after the current step. May be called by a signal handler."""
        self._stop_reason = reason

    def leave(self, reason: str = "asked to leave") -> None:
        """Take this worker out after the current step; the others go on. May be called by a signal handler."""
        self._leave_reason = self._session.leave_reason = reason

    def load(self, piece: Piece) -> Any:
        """The batch at these positions of the epoch's order. What `Step.batches` calls."""
        return self._batches.load(piece)

    def steps(self, *, epochs: int | None = None, total: int | None = None) -> Iterator[Step]:
        """One turn per attempt at a step, until `epochs` are over or `total` steps are committed.

        Counted from the beginning of the run, so a run that is resumed, or joined late, ends at the same place.
        """
        goal = _Goal(epochs, total)
        self._connect()
        while True:
            if not self._session.is_formed and not self._form(goal):
                return
            if self._stopping or goal.is_reached(self.state):
                if self._finish():
                    return
                continue
            if not self._evaluate_if_due():
                continue
            step = self._engine.next_step(self)
            yield step
            if not step.was_tried:
                raise ConflictError(
                    f"step {step.number}: step.commit() was not called; each turn of run.steps() needs it"
                )
            if not step.is_committed:
                step.gradients.restore_buffers()

    def _connect(self) -> None:
        if self.outcome is not None:
            raise ClosedError(f"this run is over: {self.outcome}")
        if not self._is_open:
            self._start_loading()
            self._is_open = True
            self._signals.install()
            self._session.connect()

    def _start_loading(self) -> None:
        """Before there are connections and handlers, which the processes would inherit."""
        if self._loading.num_workers and isinstance(self._batches, BatchSource):
            self._batches = LoadingProcesses(self._batches, self._loading, self._engine.upcoming)

    def _form(self, goal: _Goal) -> bool:
        """Whether there is a group to go on with."""
        standing = self._session.form(self._position, self._agree)
        if standing is Standing.MEMBER:
            self._last_generation = self._session.generation
            times = self._session.times[-1]
            self._log.write(
                "formed",
                committed_step=self.state.committed_step,
                digest=self._digest,
                **asdict(times),
            )
            return True
        if standing is Standing.RELEASED:
            self._end("left", "released")
            return False
        return self._end_with_the_run(goal)

    def _end_with_the_run(self, goal: _Goal) -> bool:
        """The coordinator says that it is over: fine, or an error, but no group to go on with."""
        end = self._session.ended or RunEnd("aborted", "the run has ended")
        if goal.is_reached(self.state):
            self._end("complete", end.reason)
        elif end.outcome == "completed":
            self._end("left", "the run was completed without this worker")
        elif end.outcome == "stopped":
            self._end("stopped", end.reason)
        else:
            self._log.write("aborted", reason=end.reason, committed_step=self.state.committed_step)
            raise TrainingAbortedError(end.reason, committed_step=self.state.committed_step)
        return False

    def _position(self) -> Position:
        prepared = self._engine.prepared
        return Position(self.state.committed_step, None if prepared is None else prepared.step)

    def _agree(self, group: GenerationGroup | None) -> dict[str, int]:
        """Come to one state with the others, and divide the work; what that moved."""
        prepared, epoch = self._engine.prepared, self.state.epoch
        agreement = agree(
            group,
            self.state,
            prepared=prepared,
            generation=self._last_generation,
            restore=self._restore_point(),
            held=self._engine.held_nodes,
        )
        self._engine.prepared = None
        if agreement.rolled_forward and prepared is not None:
            self._last_metrics = prepared.metrics
            self._report(prepared, epoch)
        self._digest = agreement.digest
        moved = {"state_bytes": agreement.healed_bytes}
        if self._plane is not None and self._session.topology is not None:
            membership = self._membership
            plan = self._plane.follow(
                group, self._session.topology, membership.worker_id, membership.config
            )
            moved["shards"] = len(plan.transfers_to(membership.worker_id))
            self._log.write("shards", **self._plane.report())
        self._engine.divide(agreement.held)
        return moved

    def _restore_point(self) -> Callable[[], None] | None:
        checkpointer = self._checkpointer
        if checkpointer is None or not checkpointer.plan.resume:
            return None

        def restore() -> None:
            if checkpointer.restore(self.state):
                self._log.write("resumed", committed_step=self.state.committed_step)

        return restore

    def _save_if_due(self, wishes: Wishes) -> None:
        """Rank 0 saves when the schedule says so, or when somebody must go."""
        checkpointer = self._checkpointer
        if checkpointer is None:
            return
        self._note_saved(checkpointer.poll())
        step = self.state.committed_step
        is_due = checkpointer.is_due(step, failures=len(self._session.times) - 1)
        if self._session.rank != 0:
            if is_due:
                checkpointer.note(step)
        elif wishes.leaving and not self._is_emergency_saved:
            self._save(CheckpointType.EMERGENCY)
        elif is_due:
            self._save(CheckpointType.FULL)
        self._is_emergency_saved = bool(wishes.leaving)

    def _save(self, kind: CheckpointType) -> None:
        if self._checkpointer is not None:
            self._checkpointer.save(
                self.state,
                generation=self._session.generation,
                kind=kind,
                metrics=self._last_metrics,
            )
            step = self.state.committed_step
            self._log.write("checkpoint", type=kind.value, step=step, complete=False)

    def _note_saved(self, step: int | None) -> None:
        if step is not None:
            self._log.write("checkpoint", step=step, complete=True)

    def begin_exchange(self, step: Step) -> EntryReady | None:
        """What `Step.backward` calls before the last backward pass."""
        return self._engine.begin_exchange(step)

    def commit(self, step: Step) -> bool:
        """Reduce, vote and apply. What `Step.commit` calls."""
        if self._session.interrupted:
            self._engine.abandon_exchange()
            return False
        try:
            prepared = self._engine.prepare(step)
            wishes = self._engine.vote(self._wishes())
        except GroupAbortedError as error:
            self._session.break_up(error)
            return False
        self.state.commit(prepared)
        self._engine.committed()
        step.metrics, step.is_committed = prepared.metrics, True
        self._last_metrics = step.metrics
        self._report(prepared, step.epoch)
        self._save_if_due(wishes)
        self._follow(wishes)
        return True

    def _wishes(self) -> Wishes:
        return Wishes(
            drain=int(self._session.drain_wanted),
            leaving=int(self._leave_reason is not None),
            stop=int(self._stop_reason is not None),
        )

    def _follow(self, wishes: Wishes) -> None:
        """Act on what the vote said; every member does the same after the same step."""
        if wishes.stop or wishes.leaving == self._session.world_size:
            self._stopping = True  # also when everybody was asked to leave: nobody would be left
        elif self._leave_reason is not None and not self._asked_to_leave:
            self._asked_to_leave = True
            if not self._membership.leave(self._leave_reason):
                self.stop(self._leave_reason)
        if wishes.drain:
            self._session.retire()

    def _report(self, step: Prepared, epoch: int) -> None:
        committed = CommittedStep(
            generation=self._session.generation,
            epoch=epoch,
            step=step.step,
            learning_rate=self.state.applied_rate,
            samples=sum(part.size for part in step.taken),
            metrics=step.metrics,
        )
        self._membership.report(committed)
        self._log.commit(self._session.rank, step.workers, committed)

    def _evaluate_if_due(self) -> bool:
        """Evaluate if it is time; whether the group still works."""
        evaluation = self._evaluation
        if evaluation is None or not evaluation.is_due(self.state):
            return True
        try:
            values = evaluation.run(self.model, self._session.group)
        except GroupAbortedError as error:
            self._session.break_up(error)
            return False
        self.state.evaluated_step = self.state.committed_step
        evaluation.results[self.state.committed_step] = values
        self._log.write("evaluation", step=self.state.committed_step, metrics=values)
        return True

    def _finish(self) -> bool:
        """End together: after this barrier everybody is known to have committed the last step."""
        try:
            if self._session.group is not None:
                self._session.group.all_reduce(torch.zeros(1))
        except GroupAbortedError as error:
            self._session.break_up(error)
            return False
        if self._session.rank == 0 and self._checkpointer is not None:
            if self._checkpointer.last_step != self.state.committed_step:
                self._save(CheckpointType.FULL)
            self._note_saved(self._checkpointer.settle())
        outcome = "stopped" if self._stopping else "complete"
        self._membership.finish(self._stop_reason or outcome)
        self._end(outcome, self._stop_reason or outcome)
        return True

    def _end(self, outcome: str, reason: str) -> None:
        self.outcome = outcome
        self._log.write(
            "final",
            outcome=outcome,
            reason=reason,
            committed_step=self.state.committed_step,
            digest=self.digest(),
            proof=self.state.require_exactly_once(),
        )
        if self._session.rank == 0:
            self._log.ledger(self.state.ledger)
        self.close()


class _Goal:
    def __init__(self, epochs: int | None, total: int | None) -> None:
        if (epochs is None) == (total is None):
            raise InvalidInputError("steps: say how far to go, with either `epochs` or `total`")
        for name, value in (("epochs", epochs), ("total", total)):
            if value is not None and (isinstance(value, bool) or value < 0):
                raise InvalidInputError(f"{name} = {value!r}: must be a whole number, 0 or more")
        self._epochs = epochs
        self._total = total

    def is_reached(self, state: TrainingState) -> bool:
        if self._total is not None:
            return state.committed_step + 1 >= self._total
        return state.epoch >= (self._epochs or 0)


def _plane(dataset: Any, config: RunConfig, loading: Loading) -> ShardPlane | None:
    if not isinstance(dataset, LocalShards):
        return None
    if loading.num_workers:
        raise ConfigurationError(
            "num_workers",
            loading.num_workers,
            "must be 0 for local shards: only one process may hold them",
        )
    if config.shuffle != "within_shards":
        raise ConfigurationError(
            "shuffle", config.shuffle, 'must be "within_shards" for a data set of local shards'
        )
    return ShardPlane(dataset, config.shards)


def default_membership(plane: ShardPlane | None = None) -> Membership:
    """The cluster that the environment describes; otherwise a run of one process.

    In a cluster `plane` begins to serve its shards, and the worker's port is where it does.
    """
    if os.environ.get("TENSORFORGE_COORDINATOR"):
        from tensorforge.train.group.elastic_membership import ElasticMembership

        return ElasticMembership.from_environment(serve=None if plane is None else plane.serve)
    return FixedMembership.from_environment()
