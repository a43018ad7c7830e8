"""The work on one step among the members of a generation: who computes what, the sum, the vote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tensorforge.data.plan.shards import DataShard
from tensorforge.train.data.batch_loading import Piece, pieces
from tensorforge.train.data.shard_plane import ShardPlane
from tensorforge.train.gradients.flat_layout import Entries, Layout
from tensorforge.train.gradients.reduction import Exchange, TreeReduction
from tensorforge.train.gradients.shard_gradients import EntryReady, StepGradients, step_facts
from tensorforge.train.gradients.shard_tree import Node, ShardTree
from tensorforge.train.gradients.step_work import Share, share_work
from tensorforge.train.group.session import Session
from tensorforge.train.loop.step import Step, StepHost
from tensorforge.train.loop.training_state import Prepared, TrainingState


class Wishes(NamedTuple):
    """What members want to happen after a step: each counts those who do."""

    drain: int
    leaving: int
    stop: int


class StepEngine:
    """Carries attempts at steps from the division of the work to a vote that everybody won.

    What is left of a failed attempt is kept for the next one. `prepared` is a step whose gradient is
    complete here and whose vote is open.
    """

    def __init__(self, state: TrainingState, session: Session, plane: ShardPlane | None) -> None:
        self._state = state
        self._session = session
        self._plane = plane
        config = state.config
        self._layout = Layout(state.model)
        self._tree = ShardTree(config.shards)
        self._reduction = TreeReduction(self._layout, self._tree, config.bucket_bytes)
        self._metrics = ("loss", *config.metrics)
        self._attempt: _Attempt | None = None
        self._exchange: Exchange | None = None
        self._shares: tuple[Share, ...] = ()
        self.prepared: Prepared | None = None

    def held_nodes(self) -> tuple[Node, ...]:
        """What is left of an attempt at the next step, if that step will have the same samples."""
        attempt = self._attempt
        if attempt is None or attempt.number != self._state.committed_step + 1:
            return ()
        if attempt.taken != self._state.next_batch(self._session.world_size):
            return ()
        return attempt.gradients.nodes

    def divide(self, held: Sequence[Sequence[Node]]) -> None:
        """Divide the next step among the members, of whom each one holds some nodes already."""
        self._shares = self._divided(held)
        kept = self._shares[self._session.rank].kept
        if kept and self._attempt is not None:
            self._attempt.gradients.keep_only(kept)
        else:
            self._attempt = None

    def _divided(self, held: Sequence[Sequence[Node]]) -> tuple[Share, ...]:
        places = None
        if self._plane is not None and self._plane.placement is not None:
            places = self._plane.placement.places
        return share_work(self._tree, held, places)

    def upcoming(self, first: Piece) -> Iterator[Piece]:
        """What is to be loaded here, from a piece of the current step on, as long as nothing changes."""
        rank, workers = self._session.rank, self._session.world_size
        accumulation = self._state.config.accumulation
        steps = self._state.batches_ahead(workers)

        def mine(compute: Sequence[int]) -> Iterator[Piece]:
            epoch, taken = next(steps)
            for shard in compute:
                yield from pieces(epoch, taken[shard], accumulation)

        now = list(mine(self._shares[rank].compute))
        yield from now[now.index(first) :] if first in now else (first,)
        partition = self._state.ledger.partition
        always = [s for s in self._divided([()] * workers)[rank].compute if partition[s].size]
        while always:
            yield from mine(always)

    def next_step(self, host: StepHost) -> Step:
        """An attempt at the next step."""
        state = self._state
        number, taken = state.committed_step + 1, state.next_batch(self._session.world_size)
        if self._attempt is None:
            self._attempt = _Attempt(number, taken, StepGradients(self._layout, self._tree))
        return Step(
            host,
            number=number,
            epoch=state.epoch,
            taken=taken,
            compute=self._shares[self._session.rank].compute,
            gradients=self._attempt.gradients,
        )

    def begin_exchange(self, step: Step) -> EntryReady | None:
        """Send sums while the last backward pass goes on, if it pays."""
        group = self._session.group
        if group is None or not self._reduction.overlaps or self._session.interrupted:
            return None
        parts = step.gradients.planned_parts(self._reduction.room(group.world_size))
        self._exchange = self._reduction.begin(group, self._nodes(), parts, early=True)
        return self._exchange.entry_ready

    def abandon_exchange(self) -> None:
        """The attempt is given up, and the group with it."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.abandon()

    def prepare(self, step: Step) -> Prepared:
        """The complete gradient of the step; it is remembered until the vote is known."""
        nodes = self._nodes()
        mine = step.gradients.parts(nodes[self._session.rank])
        count, names = len(self._layout.parameters), self._metrics
        facts = step_facts(mine, count, self._tree.shards, len(names))
        total = self._sum(nodes, [part.values for part in mine])
        if self._session.group is not None:
            self._session.group.all_reduce(facts)
        values = facts[count:].view(self._tree.shards, len(names)).sum(dim=0).tolist()
        self.prepared = Prepared(
            step=step.number,
            workers=self._session.world_size,
            taken=step.taken,
            gradients=step.gradients,
            total=total,
            present=(facts[:count] > 0).tolist(),
            metrics=dict(zip(names, values, strict=True)),
        )
        return self.prepared

    def _nodes(self) -> list[tuple[Node, ...]]:
        """What each member holds once its part of the step is computed."""
        return [share.nodes(self._tree) for share in self._shares]

    def _sum(self, nodes: list[tuple[Node, ...]], mine: list[Entries]) -> Entries:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            return exchange.finish()
        own = dict(zip(nodes[self._session.rank], mine, strict=True))
        return self._reduction.reduce(self._session.group, nodes, own)

    def vote(self, wishes: Wishes) -> Wishes:
        """Everybody holds the complete gradient, or this raises. Wishes are exchanged on the way.

        So is which shards have arrived at their owners: after the step they change hands.
        """
        arrived = [] if self._plane is None else self._plane.arrivals()
        ballot = torch.tensor([*wishes, *arrived], dtype=torch.int64)
        if self._session.group is not None:
            self._session.group.all_reduce(ballot)
        counts = ballot.tolist()
        if self._plane is not None:
            self._plane.hand_over(counts[len(wishes) :])
        return Wishes(*counts[: len(wishes)])

    def committed(self) -> None:
        """The prepared step is part of the state: go on to the next one."""
        self.prepared = self._attempt = None
        self.divide([()] * self._session.world_size)


class _Attempt(NamedTuple):
    number: int
    taken: tuple[DataShard, ...]
    gradients: StepGradients
