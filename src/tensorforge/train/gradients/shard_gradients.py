"""The gradient of one step: a value per shard, added up along the tree.

In the last shard a parameter's gradient is taken the moment autograd has it, so that the sums can go out
while the backward pass goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorforge.errors import ConflictError, InvalidInputError
from tensorforge.train.gradients.flat_layout import Entries, EntryPlace, Layout, entries_at
from tensorforge.train.gradients.shard_tree import Node, ShardTree

EntryReady = Callable[[EntryPlace], None]
"""Called when an entry of the last shard's sums will change no more."""


@dataclass(slots=True)
class Contribution:
    """What a node of the tree gives to the step: its sums, and how many shards used each parameter."""

    values: Entries
    present: torch.Tensor
    metrics: dict[int, list[float]] = field(default_factory=dict)
    """Shard → its metrics, weighted; shards keep their own values so that sums do not depend on who adds."""


class StepGradients:
    """Collects the shards' contributions to one step and remembers them until the step is committed.

    Between `begin_shard` and `end_shard` the model's buffers start from the step's initial values, and its
    parameters' `.grad` collects one shard's gradient alone. Within `finishing` the gradients are taken as
    autograd completes them.
    """

    def __init__(self, layout: Layout, tree: ShardTree) -> None:
        self._layout = layout
        self._tree = tree
        self._parts: dict[Node, Contribution] = {}
        self._initial_moving = [buffer.detach().clone() for buffer in layout.moving]
        self._initial_fixed = [buffer.detach().clone() for buffer in layout.fixed]
        self._open: _OpenShard | None = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that are complete here, in order."""
        self._forget_the_broken()
        return tuple(sorted(self._parts))

    def parts(self, nodes: Sequence[Node]) -> list[Contribution]:
        """The contributions of `nodes`; each must be complete here."""
        return [self._parts[node] for node in nodes]

    def keep_only(self, nodes: Sequence[Node]) -> None:
        """Forget all nodes but these."""
        self._forget_the_broken()
        wanted = set(nodes)
        for node in [node for node in self._parts if node not in wanted]:
            del self._parts[node]

    def begin_shard(self, shard: int) -> None:
        """Make the model ready for one shard."""
        self._forget_the_broken()
        self.restore_buffers()
        for parameter in self._layout.parameters:
            parameter.grad = None
        self._open = self._open_shard(shard)

    def restore_buffers(self) -> None:
        """Give the buffers their values from before the step."""
        layout = self._layout
        with torch.no_grad():
            for buffer, initial in zip(layout.moving, self._initial_moving, strict=True):
                buffer.copy_(initial)
            for buffer, initial in zip(layout.fixed, self._initial_fixed, strict=True):
                buffer.copy_(initial)

    def planned_parts(self, room: Entries) -> dict[Node, Entries]:
        """The sums of all nodes here as they will be once the open shard is done: filled as it goes on.

        Those that the open shard goes into will lie in `room`, if nothing else does and they are sums.
        """
        shard = self._shard()
        if shard.parts and all(part.values is not room for part in self._parts.values()):
            shard.target = room
        gone = {sibling for sibling, _ in shard.merges}
        parts = {node: part.values for node, part in self._parts.items() if node not in gone}
        parts[shard.node] = shard.target
        return parts

    @contextmanager
    def finishing(self, ready: EntryReady) -> Iterator[None]:
        """Take each gradient as soon as the backward pass inside, the shard's last, has completed it.

        `ready` hears of each; it must not raise.
        """
        shard = self._shard()
        shard.is_touched = True
        parameters: list[Any] = self._layout.parameters
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(number, ready))
            for number, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, number: int, ready: EntryReady) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            shard = self._shard()
            if shard.taken[number]:
                raise ConflictError(
                    "a parameter got its gradient twice in one backward pass, as reentrant activation "
                    "checkpointing does; use the other kind (use_reentrant=False)"
                )
            self._take(shard, number, parameter)
            ready(self._layout.parameter_places[number])

        return take

    def _take(self, shard: _OpenShard, number: int, parameter: torch.Tensor) -> None:
        """Add a parameter's gradient, zero if it has none, to the sums, and clear it."""
        gradient = parameter.grad
        shard.taken[number] = True
        shard.present[number] = gradient is not None
        value = torch.zeros_like(parameter) if gradient is None else _dense(gradient, parameter)
        shard.add(self._layout.parameter_places[number], value)
        parameter.grad = None

    def end_shard(self, share: float, metrics: list[float]) -> None:
        """Take the rest of the shard, its buffers too; `share` is its part of the step's samples."""
        layout, shard = self._layout, self._shard()
        shard.is_touched = True
        with torch.no_grad():
            for number, parameter in enumerate(layout.parameters):
                if not shard.taken[number]:
                    self._take(shard, number, parameter)
            moving = zip(layout.moving_places, layout.moving, self._initial_moving, strict=True)
            for place, buffer, initial in moving:
                shard.add(place, (buffer - initial).mul_(share))
            for place, buffer in zip(layout.fixed_places, layout.fixed, strict=True):
                shard.choose(place, buffer)
        self._close_shard(metrics)

    def put_nothing(self, shard: int, metrics: int) -> None:
        """A shard without samples in this step: it counts as zero."""
        layout = self._layout
        opened = self._open = self._open_shard(shard)
        opened.is_touched = True
        with torch.no_grad():
            still = [*layout.parameters, *layout.moving]
            for place, like in zip(
                (*layout.parameter_places, *layout.moving_places), still, strict=True
            ):
                opened.add(place, torch.zeros_like(like))
            for place, initial in zip(layout.fixed_places, self._initial_fixed, strict=True):
                opened.choose(place, initial)
        self._close_shard([0.0] * metrics)

    def _open_shard(self, shard: int) -> _OpenShard:
        leaf = (shard, shard + 1)
        merges, node = self._tree.merges(leaf, self._parts)
        parts = [(self._parts[sibling].values, is_left) for sibling, is_left in merges]
        target = parts[-1][0] if parts else self._layout.no_entries()
        present = torch.zeros(len(self._layout.parameters), dtype=torch.float64)
        return _OpenShard(shard, node, tuple(merges), parts, target, present)

    def _shard(self) -> _OpenShard:
        if self._open is None:
            raise ConflictError("no shard is being computed")
        return self._open

    def _close_shard(self, metrics: list[float]) -> None:
        shard, self._open = self._shard(), None
        total = Contribution(shard.target, shard.present, {shard.number: metrics})
        for sibling, _ in shard.merges:
            part = self._parts.pop(sibling)
            total.present += part.present
            total.metrics |= part.metrics
        self._parts[shard.node] = total

    def _forget_the_broken(self) -> None:
        """A shard that was given up half-way has spoilt the sums that it was being added to."""
        shard, self._open = self._open, None
        if shard is not None and shard.is_touched:
            for sibling, _ in shard.merges:
                del self._parts[sibling]

    def install(self, total: Entries, present: Sequence[bool]) -> None:
        """Make the step's sum the model's gradient and advance the buffers.

        A parameter that no shard used has no gradient, so that optimizers leave it alone.
        """
        layout = self._layout
        gradients = entries_at(total, layout.parameter_places)
        for parameter, gradient, used in zip(layout.parameters, gradients, present, strict=True):
            parameter.grad = gradient if used else None
        with torch.no_grad():
            changes = entries_at(total, layout.moving_places)
            before = zip(layout.moving, self._initial_moving, changes, strict=True)
            for buffer, initial, change in before:
                buffer.copy_(initial + change)
            fixed = entries_at(total, layout.fixed_places)
            for buffer, value in zip(layout.fixed, fixed, strict=True):
                buffer.copy_(value)


@dataclass(slots=True)
class _OpenShard:
    """A shard that is being computed, and the sums that it goes into.

    `merges` are the complete siblings that it joins on its way up, to `node`; `parts` are their sums,
    and whether the sibling is the left one. The sum at `node` will be in `target`: the memory of the last of
    the parts, if there are any, or memory that is meant for sending.
    """

    number: int
    node: Node
    merges: tuple[tuple[Node, bool], ...]
    parts: list[tuple[Entries, bool]]
    target: Entries
    present: torch.Tensor
    taken: list[bool] = field(init=False)
    is_touched: bool = False

    def __post_init__(self) -> None:
        self.taken = [False] * self.present.numel()

    def add(self, place: EntryPlace, value: torch.Tensor) -> None:
        """Add an entry along the tree. A sum does not depend on which of its two sides it is stored in."""
        group, entry = place
        if not self.parts:
            self.target[group][entry] = value
            return
        for values, _ in self.parts[:-1]:
            value = values[group][entry].add_(value)
        torch.add(self.parts[-1][0][group][entry], value, out=self.target[group][entry])

    def choose(self, place: EntryPlace, value: torch.Tensor) -> None:
        """Of values that are not added up the leftmost shard's is taken."""
        group, entry = place
        for values, is_left in self.parts:
            if is_left:
                value = values[group][entry]
        if self.parts:
            self.target[group][entry].copy_(value)
        else:
            self.target[group][entry] = value.clone()


def step_facts(
    parts: Sequence[Contribution], parameters: int, shards: int, metrics: int
) -> torch.Tensor:
    """How many shards used each parameter, then every shard's metrics, as far as is known here.

    The sum over all members is complete, and exact: each shard's place is filled by one of them.
    """
    used = torch.zeros(parameters, dtype=torch.float64)
    table = torch.zeros(shards, metrics, dtype=torch.float64)
    for part in parts:
        used += part.present
        for shard, values in part.metrics.items():
            table[shard] = torch.tensor(values, dtype=torch.float64)
    return torch.cat([used, table.view(-1)])


def _dense(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.dtype != parameter.dtype:
        raise InvalidInputError(
            f"a gradient of {gradient.dtype} for a parameter of {parameter.dtype}: they must agree"
        )
    return gradient.detach().contiguous()
