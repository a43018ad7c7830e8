"""The run: what a training script makes, and the loop that goes on through every change of the cluster."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from tensorforge.catalog import CheckpointType
from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.cluster.ended_runs import note_outcome
from tensorforge.cluster.goal import Goal
from tensorforge.elastic.protocol.messages import Verdict
from tensorforge.environment import COORDINATOR
from tensorforge.errors import (
    ClosedError,
    ConfigurationError,
    ConflictError,
    InvalidInputError,
    TrainingAbortedError,
)
from tensorforge.train.data.batch_loading import BatchLoader, BatchSource, Collate, dataset_size
from tensorforge.train.data.loading_processes import Loading, LoadingProcesses
from tensorforge.train.data.local_shards import LocalShards
from tensorforge.train.data.shard_plane import ShardPlane
from tensorforge.train.evaluation import Evaluation
from tensorforge.train.group.agreement import agree
from tensorforge.train.group.gloo_group import GenerationGroup, GroupAbortedError
from tensorforge.train.group.membership import FixedMembership, Membership, RunEnd
from tensorforge.train.group.run_terms import run_terms
from tensorforge.train.group.session import FormOutcome, Requests, Session
from tensorforge.train.loop.engine import StepEngine
from tensorforge.train.loop.step import Step
from tensorforge.train.loop.training_state import PreparedStep, Stateful, TrainingState
from tensorforge.train.run_checkpoints import Checkpointer, CheckpointPlan
from tensorforge.train.run_config import RunConfig
from tensorforge.train.run_log import RunLog
from tensorforge.train.signals import SignalHandlers
from tensorforge.train.supported_models import check_devices, check_model
from tensorforge.validation import whole_number


class Run:
    """Elastic training of one model.

        with Run(model, optimizer, dataset, RunConfig(batch_size=48)) as run:
            for step in run.steps(epochs=3):
                for x, y in step.batches():
                    step.backward(loss_function(model(x), y))
                step.commit()

    A script that is started alone is a run of one process. Started by `tensorforge run` or `tensorforge
    worker` it is one worker of an elastic run, in which every worker runs the same script. While `steps` is
    iterated over in the main thread, SIGTERM makes this worker leave after its step, and SIGUSR2 stops the
    run on all workers.

    `before_update` is called before the optimizer's step, when the gradients of all workers are summed up in
    `.grad`. What it does must depend on the model alone.

    `after_update` is called inside the commit, after optimizer and scheduler, on every worker, for every step
    that updates the weights. What belongs to the state, such as an average of the weights or a target network,
    is updated there (and passed in `stateful`): a step may be committed while the cluster changes, outside of
    the loop, and checkpoints are taken right after it. `on_commit` is told of every committed step on every
    worker; it is for whatever only watches, such as a logger.
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
        after_update: Callable[[], None] | None = None,
        on_commit: Callable[[CommittedStep], None] | None = None,
        evaluation: Evaluation | None = None,
        checkpoints: CheckpointPlan | None = None,
        membership: Membership | None = None,
    ) -> None:
        check_model(model)
        check_devices(model, frozenset({"cpu"}))
        if checkpoints is not None:
            checkpoints.require_known_metric(
                ("loss", *config.metrics), has_evaluation=evaluation is not None
            )
        self.model = model
        self.config = config
        self._dataset = dataset
        self._loading = loading or Loading()
        self._batches: BatchLoader = BatchSource(dataset, config, collate_fn)
        self.state = TrainingState(
            model,
            optimizer,
            dataset_size(dataset),
            config,
            scheduler=scheduler,
            stateful=stateful,
            before_update=before_update,
            after_update=after_update,
        )
        self._on_commit = on_commit
        self._plane = _shard_plane(dataset, config, self._loading)
        self._membership = membership if membership is not None else default_membership(self._plane)
        self._session = Session(self._membership)
        self._engine = StepEngine(self.state, self._session, self._plane, self._after_commit)
        self._evaluation = evaluation
        self._log = RunLog.from_environment(self._membership.worker_id.id)
        self._checkpointer = (
            None
            if checkpoints is None
            else Checkpointer(checkpoints, self._log, evaluation=evaluation)
        )
        self._last_metrics: dict[str, float] = {}
        self._signals = SignalHandlers(
            {
                signal.SIGTERM: lambda: self.leave("SIGTERM"),
                signal.SIGUSR2: lambda: self.stop("SIGUSR2"),
            }
        )
        self._is_open = False
        self._rolled_forward: PreparedStep | None = None
        """A step that was committed while the group was formed, until the loop has been told of it."""
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
        """The error to raise if the script left the loop while other workers wait for it there, else `None`."""
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

    def digest(self) -> str:
        """A 128-bit hash, in hex, of the state: weights, buffers, optimizer, scheduler, ledger."""
        return self.state.capture().digest().hex()

    def stop(self, reason: str = "asked to stop") -> None:
        """Stop the run on all workers after the current step. May be called by a signal handler."""
        self._session.stop_reason = reason

    def leave(self, reason: str = "asked to leave") -> None:
        """Leave after the current step; the other workers go on. May be called by a signal handler."""
        self._session.leave_reason = reason

    def steps(self, *, epochs: int | None = None, total: int | None = None) -> Iterator[Step]:
        """Yield one attempt at a step after another, until `epochs` are over or `total` steps are committed.

        `step.commit()` returns `True` once for each step. A step that was committed while the cluster changed
        is yielded once more for that, with no batches left to compute. `epochs` and `total`
        count from the beginning of the run, so all workers end at the same step, also those that joined late or
        resumed from a checkpoint.
        """
        goal = _goal(epochs, total)
        self._connect(goal)
        while True:
            if not self._session.is_formed and not self._form(goal):
                return
            if self._rolled_forward is not None:
                yield self._engine.committed_step(self._rolled_forward, self._batches)
                self._rolled_forward = None
                continue
            if self._session.is_stopping or self._is_reached(goal):
                if self._finish(goal):
                    return
                continue
            if not self._evaluate_if_due():
                continue
            step = self._engine.next_step(self._batches)
            yield step
            if not step.was_tried:
                raise ConflictError(
                    f"step {step.number}: step.commit() was not called; each turn of run.steps() needs it"
                )
            if not step.is_committed:
                step.gradients.restore_buffers()

    def _is_reached(self, goal: Goal) -> bool:
        return goal.is_reached(self.state.committed_step, self.state.epoch)

    def _connect(self, goal: Goal) -> None:
        if self.outcome is not None:
            raise ClosedError(f"this run is over: {self.outcome}")
        if not self._is_open:
            self._start_loading()
            self._is_open = True
            self._signals.install()
            self._session.connect(run_terms(self.state, self.config, self._dataset), goal)
            self.state.adopt_strategy(self._membership.config.lr_adaptation_strategy)

    def _start_loading(self) -> None:
        # Before there are connections and signal handlers, which the processes would inherit.
        if self._loading.num_workers and isinstance(self._batches, BatchSource):
            self._batches = LoadingProcesses(self._batches, self._loading, self._engine.upcoming)

    def _form(self, goal: Goal) -> bool:
        """Become a member of a working group; return `False` if the run has ended here instead."""
        outcome = self._session.form(self._position, self._agree)
        if outcome is FormOutcome.MEMBER:
            self._log.write(
                "formed",
                committed_step=self.state.committed_step,
                digest=self._digest,
                **asdict(self._session.formations[-1]),
            )
            return True
        if outcome is FormOutcome.RELEASED:
            self._end("left", "released")
            return False
        return self._end_with_the_run(goal)

    def _end_with_the_run(self, goal: Goal) -> bool:
        """Note how the run ended for all workers; raise `TrainingAbortedError` if it was aborted."""
        end = self._session.ended or RunEnd("aborted", "the run has ended")
        if end.emergency:
            self._save_emergency()
        if end.outcome == "completed" and self._is_reached(goal):
            self._end("complete", end.reason)
        elif end.outcome == "completed":
            self._end("left", "the run was completed without this worker")
        elif end.outcome == "stopped":
            self._end("stopped", end.reason)
        else:
            self._log.write("aborted", reason=end.reason, committed_step=self.state.committed_step)
            raise TrainingAbortedError(end.reason, committed_step=self.state.committed_step)
        return False

    def _save_emergency(self) -> None:
        """Save the state before this worker ends, because the coordinator chose this worker for it."""
        if self._checkpointer is not None and self._session.last_formed_generation > 0:
            self._checkpointer.save_now(self.state, self._last_metrics, CheckpointType.EMERGENCY)

    def _position(self) -> tuple[int, int | None]:
        prepared = self._engine.prepared
        return self.state.committed_step, None if prepared is None else prepared.step

    def _agree(self, group: GenerationGroup | None, verdict: Verdict) -> dict[str, int]:
        """Come to one state with the other members and divide the next step; return what was moved for that."""
        prepared, restore = self._engine.prepared, None
        if self._checkpointer is not None and self._checkpointer.plan.resume:
            restore = partial(self._checkpointer.restore, self.state)
        agreement = agree(
            group,
            self.state,
            prepared=prepared,
            commit=self._roll_forward,
            verdict=verdict,
            restore=restore,
            finished_nodes=self._engine.finished_nodes,
        )
        self._engine.prepared = None
        self._digest = agreement.digest
        moved = {"state_bytes": agreement.healed_bytes}
        if self._plane is not None and self._session.topology is not None:
            membership = self._membership
            plan = self._plane.follow(
                group, self._session.topology, membership.worker_id, membership.config
            )
            moved["shards"] = len(plan.transfers_to(membership.worker_id))
            self._log.write(
                "shards",
                moved_shards=plan.moved_units,
                minimum=plan.minimum_moves,
                from_origin=sum(move.source_worker is None for move in plan.transfers),
            )
        self._engine.divide(agreement.finished_nodes)
        return moved

    def _roll_forward(self, step: PreparedStep) -> None:
        """Commit a step whose vote was not known here when its group broke."""
        self.state.commit(step)
        self._engine.prepared = None
        self._rolled_forward = step
        self._report(step)

    def _after_commit(self, step: PreparedStep, requests: Requests) -> None:
        self._report(step)
        if self._checkpointer is not None:
            self._checkpointer.after_commit(
                self.state,
                step.metrics,
                rank=self._session.rank,
                failures=len(self._session.formations) - 1,
                is_leaving=bool(requests.leave),
            )

    def _report(self, step: PreparedStep) -> None:
        """Report a committed step to the coordinator and write it to the run's log."""
        self._last_metrics = step.metrics
        committed = CommittedStep(
            generation=self._session.generation,
            epoch=step.epoch,
            step=step.step,
            learning_rate=self.state.applied_rate,
            samples=sum(part.size for part in step.taken),
            metrics=step.metrics,
            is_skipped=step.is_skipped,
        )
        self._membership.report(committed)
        self._log.commit(self._session.rank, step.workers, committed)
        if self._on_commit is not None:
            self._on_commit(committed)

    def _evaluate_if_due(self) -> bool:
        """Evaluate if an evaluation is due; return `False` if the group broke meanwhile."""
        evaluation = self._evaluation
        if evaluation is None or not evaluation.is_due(self.state):
            return True
        try:
            values = evaluation.run(self.model, self._session.group)
        except GroupAbortedError as error:
            self._session.abandon_group(error)
            return False
        self.state.evaluated_step = self.state.committed_step
        evaluation.results[self.state.committed_step] = values
        self._log.write("evaluation", step=self.state.committed_step, metrics=values)
        if self._checkpointer is not None:
            self._checkpointer.after_evaluation(
                self.state, self._last_metrics, rank=self._session.rank
            )
        return True

    def _finish(self, goal: Goal) -> bool:
        """End the run together with the other members; return `False` if the group broke before that.

        After the first barrier every member is known to have committed the last step. If rank 0 cannot save the
        last state, or dies, the others have not ended: they form a group again, and the next rank 0 saves.
        """
        try:
            self._wait_for_all()
            if self._checkpointer is not None:
                if self._session.rank == 0:
                    self._checkpointer.after_last_step(self.state, self._last_metrics)
                self._wait_for_all()
        except GroupAbortedError as error:
            self._session.abandon_group(error)
            return False
        outcome = "complete" if self._is_reached(goal) else "stopped"
        reason = self._session.stop_reason or ""
        self._membership.finish(
            reason, committed_step=self.state.committed_step, epoch=self.state.epoch
        )
        self._end(outcome, reason or outcome)
        return True

    def _wait_for_all(self) -> None:
        if self._session.group is not None:
            self._session.group.all_reduce(torch.zeros(1))

    def _end(self, outcome: str, reason: str) -> None:
        self.outcome = outcome
        note_outcome(outcome)
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


def _goal(epochs: int | None, total: int | None) -> Goal:
    if (epochs is None) == (total is None):
        raise InvalidInputError("steps: say how far to go, with either `epochs` or `total`")
    for name, value in (("epochs", epochs), ("total", total)):
        if value is not None:
            whole_number(name, value, least=0)
    return Goal(steps=total, epochs=epochs)


def _shard_plane(dataset: Any, config: RunConfig, loading: Loading) -> ShardPlane | None:
    if not isinstance(dataset, LocalShards):
        return None
    if loading.num_workers:
        raise ConfigurationError(
            "num_workers",
            loading.num_workers,
            "must be 0 for local shards: only one process may store them",
        )
    if config.shuffle != "within_shards":
        raise ConfigurationError(
            "shuffle", config.shuffle, 'must be "within_shards" for a data set of local shards'
        )
    return ShardPlane(dataset, config.shards)


def default_membership(plane: ShardPlane | None = None) -> Membership:
    """The membership that the environment variables describe; without them, a run of one process.

    In a cluster `plane` begins to serve its shards, on the port that the worker's identity tells the others.
    """
    if COORDINATOR.read() is not None:
        from tensorforge.train.group.elastic_membership import ElasticMembership

        return ElasticMembership.from_environment(serve=None if plane is None else plane.serve)
    return FixedMembership.from_environment()
