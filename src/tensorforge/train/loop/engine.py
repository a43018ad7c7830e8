"""The work on one step among the members of a generation: who computes what, the sum, the vote, the commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from tensorforge.data.plan.shards import DataShard
from tensorforge.train.data.batch_loading import BatchLoader, MicroBatch, micro_batches
from tensorforge.train.data.shard_plane import ShardPlane
from tensorforge.train.gradients.flat_layout import Entries, FlatLayout
from tensorforge.train.gradients.reduction import Exchange, TreeReduction
from tensorforge.train.gradients.shard_gradients import (
    StepGradients,
    usage_and_metrics,
)
from tensorforge.train.gradients.shard_tree import Node, ShardTree
from tensorforge.train.gradients.step_work import Share, share_work
from tensorforge.train.group.fabric import GroupAbortedError
from tensorforge.train.group.session import Requests, Session
from tensorforge.train.loop.step import Step
from tensorforge.train.loop.training_state import PreparedStep, TrainingState


class StepEngine:
    """Carries each attempt at a step from the division of the work to the commit.

    If an attempt fails, its finished sums are kept for the next attempt at the same step. `prepared` is the
    step whose gradient is complete here while its vote is open. `committed` is called after each commit,
    with the step and the counts of its vote.
    """

    def __init__(
        self,
        state: TrainingState,
        session: Session,
        plane: ShardPlane | None,
        committed: Callable[[PreparedStep, Requests], None],
    ) -> None:
        self._state = state
        self.session = session
        self._plane = plane
        self._committed = committed
        self.config = state.config
        self._layout = FlatLayout(state.model)
        self.device = self._layout.device
        self._tree = ShardTree(self.config.shards)
        self._reduction = TreeReduction(self._layout, self._tree, self.config.bucket_bytes)
        self._metrics = ("loss", *self.config.metrics)
        self._attempt: _Attempt | None = None
        self._exchange: Exchange | None = None
        self._accumulates_once: bool | None = None
        """Whether each gradient is final after one accumulation; `None` until a backward pass was watched."""
        self._shares: tuple[Share, ...] = ()
        self.prepared: PreparedStep | None = None

    @property
    def loss_scale(self) -> float:
        """The factor of this step's loss; 1 without loss scaling."""
        return self._state.loss_scale.value

    def finished_nodes(self) -> tuple[Node, ...]:
        """The nodes that a failed attempt has finished here, if the next attempt will have the same samples."""
        attempt = self._attempt
        if attempt is None or attempt.number != self._state.committed_step + 1:
            return ()
        if attempt.taken != self._state.next_batch(self.session.world_size):
            return ()
        return attempt.gradients.nodes

    def divide(self, finished: Sequence[Sequence[Node]]) -> None:
        """Divide the next step among the members; `finished` are the nodes that each member has already."""
        self._shares = self._divided(finished)
        kept = self._shares[self.session.rank].kept
        if kept and self._attempt is not None:
            self._attempt.gradients.keep_only(kept)
        else:
            self._attempt = None

    def _divided(self, finished: Sequence[Sequence[Node]]) -> tuple[Share, ...]:
        computed_by = None
        if self._plane is not None and self._plane.placement is not None:
            computed_by = self._plane.placement.computed_by
        return share_work(self._tree, finished, computed_by)

    def upcoming(self, first: MicroBatch) -> Iterator[MicroBatch]:
        """This worker's micro-batches from `first` (in the current step) on, as long as nothing changes."""
        rank, workers = self.session.rank, self.session.world_size
        accumulation = self.config.accumulation
        steps = self._state.batches_ahead(workers)

        def of_next_step(shards: Sequence[int]) -> Iterator[MicroBatch]:
            epoch, taken = next(steps)
            for shard in shards:
                yield from micro_batches(epoch, taken[shard], accumulation)

        current = list(of_next_step(self._shares[rank].compute))
        yield from current[current.index(first) :] if first in current else (first,)
        partition = self._state.ledger.partition
        later = [s for s in self._divided([()] * workers)[rank].compute if partition[s].size]
        while later:
            yield from of_next_step(later)

    def next_step(self, batches: BatchLoader) -> Step:
        """Begin an attempt at the next step, whose micro-batches come from `batches`."""
        state = self._state
        number, taken = state.committed_step + 1, state.next_batch(self.session.world_size)
        if self._attempt is None:
            self._attempt = _Attempt(number, taken, StepGradients(self._layout, self._tree))
        return Step(
            self,
            batches,
            number=number,
            epoch=state.epoch,
            taken=taken,
            compute=self._shares[self.session.rank].compute,
            gradients=self._attempt.gradients,
        )

    def committed_step(self, prepared: PreparedStep, batches: BatchLoader) -> Step:
        """A step that is committed already: nothing to compute, and its `commit` returns `True`."""
        step = Step(
            self,
            batches,
            number=prepared.step,
            epoch=prepared.epoch,
            taken=prepared.taken,
            compute=(),
            gradients=prepared.gradients,
        )
        step.metrics, step.is_committed = prepared.metrics, True
        return step

    @contextmanager
    def last_backward(self, step: Step) -> Iterator[None]:
        """Send sums while the last backward pass goes on inside, if that pays and the model allows it.

        A gradient may be sent once it is final. That is known when autograd has accumulated it, unless autograd
        does so several times in one pass, as with reentrant activation checkpointing. The first pass finds out.
        """
        group = self.session.group
        if group is None or not self._reduction.overlaps or self.session.interrupted:
            yield
        elif self._accumulates_once is None:
            with step.gradients.counting() as counts:
                yield
            self._accumulates_once = max(counts, default=0) <= 1
        elif self._accumulates_once:
            sums = step.gradients.planned_sums(self._reduction.send_buffer(group.world_size))
            self._exchange = self._reduction.begin(group, self._nodes(), sums, early=True)
            with step.gradients.collecting(self._exchange.entry_ready):
                yield
        else:
            yield

    def abandon_exchange(self) -> None:
        """Give up the exchange that is under way, if any, and the group with it."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.abandon()

    def commit(self, step: Step) -> bool:
        """Sum the gradient over all members, vote, and apply the step; return whether the step is committed.

        If the group breaks before the vote is known here, nothing is applied. The next generation then decides
        whether all members apply the prepared step or none does (see `agreement`).
        """
        if self.session.interrupted:
            self.abandon_exchange()
            return False
        try:
            prepared = self.prepared = self._prepare(step)
            requests = self._vote()
        except GroupAbortedError as error:
            self.session.abandon_group(error)
            return False
        self._state.commit(prepared)
        self.prepared = self._attempt = None
        self.divide([()] * self.session.world_size)
        step.metrics, step.is_committed = prepared.metrics, True
        self._committed(prepared, requests)
        self.session.follow(requests)
        return True

    def _prepare(self, step: Step) -> PreparedStep:
        """Complete the step's gradient and metrics over all members."""
        nodes = self._nodes()
        sums = step.gradients.sums(nodes[self.session.rank])
        count, names = len(self._layout.parameters), self._metrics
        facts = usage_and_metrics(sums, count, self._tree.shards, len(names))
        total = self._total(nodes, [each.values for each in sums])
        if self.session.group is not None:
            self.session.group.all_reduce(facts)
        values = facts[count:].view(self._tree.shards, len(names)).sum(dim=0).tolist()
        return PreparedStep(
            step=step.number,
            epoch=step.epoch,
            workers=self.session.world_size,
            taken=step.taken,
            gradients=step.gradients,
            total=total,
            used=(facts[:count] > 0).tolist(),
            metrics=dict(zip(names, values, strict=True)),
        )

    def _nodes(self) -> list[tuple[Node, ...]]:
        """The nodes that each member has once its share of the step is computed."""
        return [share.nodes(self._tree) for share in self._shares]

    def _total(self, nodes: list[tuple[Node, ...]], sums: list[Entries]) -> Entries:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            return exchange.finish()
        own = dict(zip(nodes[self.session.rank], sums, strict=True))
        return self._reduction.reduce(self.session.group, nodes, own)

    def _vote(self) -> Requests:
        """Return the counts of all members' requests. Once it returns, every member has prepared the step.

        The vote also says which shards have arrived at their owners; from the next step on these compute them.
        """
        requests = self.session.requests()
        arrived = [] if self._plane is None else self._plane.arrivals()
        ballot = torch.tensor([*requests, *arrived], dtype=torch.int64)
        if self.session.group is not None:
            self.session.group.all_reduce(ballot)
        counts = ballot.tolist()
        if self._plane is not None:
            self._plane.follow_arrivals(counts[len(requests) :])
        return Requests(*counts[: len(requests)])


class _Attempt(NamedTuple):
    number: int
    taken: tuple[DataShard, ...]
    gradients: StepGradients
