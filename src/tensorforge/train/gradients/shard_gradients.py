"""The gradient of one step on this worker: one value per shard, added up along the tree.

During the last backward pass of a step each parameter's gradient is collected as soon as autograd has computed
it, so that sums can be sent while the backward pass goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorforge.errors import ConflictError, InvalidInputError
from tensorforge.train.gradients.flat_layout import Entries, EntryIndex, FlatLayout, entries_at
from tensorforge.train.gradients.shard_tree import Node, ShardTree

EntryReady = Callable[[EntryIndex], None]
"""Called with an entry of the last shard's sums once that entry is final."""


Metric = float | torch.Tensor
"""A number, or a float64 tensor with one element on the model's device that nobody has read yet."""


@dataclass(slots=True)
class NodeSum:
    """A node's sums: of gradients and buffers (`values`), and how many shards used each parameter (`uses`)."""

    values: Entries
    uses: torch.Tensor
    metrics: dict[int, list[Metric]] = field(default_factory=dict)
    """Shard → its weighted metrics. They are summed only at the end, in shard order, on every member."""


class StepGradients:
    """Collects the sums of the shards that this worker computes for one step, until the step is committed.

    Between `begin_shard` and `end_shard` the model's buffers start from the values that they had before the
    step, and each parameter's `.grad` collects the gradient of one shard alone. Within `collecting` the
    gradients are taken as autograd completes them.
    """

    def __init__(self, layout: FlatLayout, tree: ShardTree) -> None:
        self._layout = layout
        self._tree = tree
        self._sums: dict[Node, NodeSum] = {}
        self._initial_floats = [buffer.detach().clone() for buffer in layout.float_buffers]
        self._initial_others = [buffer.detach().clone() for buffer in layout.other_buffers]
        self._open: _OpenShard | None = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that are complete here, in order."""
        self._discard_unfinished_shard()
        return tuple(sorted(self._sums))

    def sums(self, nodes: Sequence[Node]) -> list[NodeSum]:
        """The sums of `nodes`; each node must be complete here."""
        return [self._sums[node] for node in nodes]

    def keep_only(self, nodes: Sequence[Node]) -> None:
        """Forget all nodes but these."""
        self._discard_unfinished_shard()
        self._sums = {node: self._sums[node] for node in nodes}

    def begin_shard(self, shard: int) -> None:
        """Prepare the model for one shard: initial buffers, no gradients."""
        self._discard_unfinished_shard()
        self.restore_buffers()
        for parameter in self._layout.parameters:
            parameter.grad = None
        self._open = self._open_shard(shard)

    def restore_buffers(self) -> None:
        """Give the buffers the values that they had before the step."""
        buffers = [*self._layout.float_buffers, *self._layout.other_buffers]
        before = [*self._initial_floats, *self._initial_others]
        with torch.no_grad():
            for buffer, initial in zip(buffers, before, strict=True):
                buffer.copy_(initial)

    def planned_sums(self, send_buffer: Entries) -> dict[Node, Entries]:
        """The values of all nodes as they will be once the open shard is done; they fill while it is computed.

        The values of the node that the open shard completes will lie in `send_buffer`, unless that is occupied
        or the shard is added to nothing.
        """
        shard = self._shard()
        if shard.siblings and all(total.values is not send_buffer for total in self._sums.values()):
            shard.target = send_buffer
        merged = {sibling for sibling, _ in shard.merges}
        planned = {node: total.values for node, total in self._sums.items() if node not in merged}
        planned[shard.node] = shard.target
        return planned

    @contextmanager
    def collecting(self, ready: EntryReady) -> Iterator[None]:
        """Take each gradient as soon as the backward pass inside, the shard's last, has completed it.

        `ready` is called for each gradient; it must not raise.
        """
        shard = self._shard()
        shard.is_touched = True
        with self._hooked(lambda number: self._hook(number, ready)):
            yield

    @contextmanager
    def counting(self) -> Iterator[list[int]]:
        """Count, per parameter, how often the backward pass inside accumulates its gradient."""
        counts = [0] * len(self._layout.parameters)

        def count(number: int) -> Callable[[torch.Tensor], None]:
            def seen(_parameter: torch.Tensor) -> None:
                counts[number] += 1

            return seen

        with self._hooked(count):
            yield counts

    @contextmanager
    def _hooked(self, make: Callable[[int], Callable[[torch.Tensor], None]]) -> Iterator[None]:
        """Call `make(number)`'s result inside whenever a parameter's gradient was accumulated."""
        parameters: list[Any] = self._layout.parameters
        hooks = [
            parameter.register_post_accumulate_grad_hook(make(number))
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
                    "a parameter got its gradient twice in one backward pass, but once in the first one: "
                    "reentrant activation checkpointing must be used from the first step on, or never"
                )
            self._take(shard, number, parameter)
            ready(self._layout.parameter_entries[number])

        return take

    def _take(self, shard: _OpenShard, number: int, parameter: torch.Tensor) -> None:
        """Add a parameter's gradient, zero if it has none, to the sums, and clear it."""
        gradient = parameter.grad
        shard.taken[number] = True
        index = self._layout.parameter_entries[number]
        earlier = shard.earlier.pop(number, None)
        shard.uses[number] = gradient is not None or earlier is not None
        value = (
            self._layout.zeros(index)
            if gradient is None
            else self._summand(index, gradient, parameter)
        )
        shard.add(index, value if earlier is None else earlier.add_(value))
        parameter.grad = None

    def _summand(
        self, index: EntryIndex, gradient: torch.Tensor, parameter: torch.Tensor
    ) -> torch.Tensor:
        return _dense(gradient, parameter).to(self._layout.dtype(index))

    def end_micro_batch(self) -> None:
        """Take the gradients of half-precision parameters, to sum micro-batches in full precision."""
        shard = self._shard()
        for number in self._layout.half_precision:
            parameter = self._layout.parameters[number]
            if parameter.grad is None:
                continue
            index = self._layout.parameter_entries[number]
            value = self._summand(index, parameter.grad, parameter)
            earlier = shard.earlier.get(number)
            shard.earlier[number] = value if earlier is None else earlier.add_(value)
            parameter.grad = None

    def end_shard(self, share: float, metrics: list[Metric]) -> None:
        """Take the remaining gradients and the buffers; `share` is the shard's part of the step's samples."""
        layout, shard = self._layout, self._shard()
        shard.is_touched = True
        with torch.no_grad():
            for number, parameter in enumerate(layout.parameters):
                if not shard.taken[number]:
                    self._take(shard, number, parameter)
            floats = zip(
                layout.float_buffer_entries, layout.float_buffers, self._initial_floats, strict=True
            )
            for index, buffer, initial in floats:
                dtype = layout.dtype(index)
                shard.add(index, (buffer.to(dtype) - initial.to(dtype)).mul_(share))
            for index, buffer in zip(
                layout.other_buffer_entries, layout.other_buffers, strict=True
            ):
                shard.choose(index, buffer)
        self._close_shard(metrics)

    def add_empty_shard(self, shard: int, metrics: int) -> None:
        """Count a shard without samples in this step as zero, with as many zero `metrics`."""
        layout = self._layout
        opened = self._open = self._open_shard(shard)
        opened.is_touched = True
        with torch.no_grad():
            for index in (*layout.parameter_entries, *layout.float_buffer_entries):
                opened.add(index, layout.zeros(index))
            for index, initial in zip(
                layout.other_buffer_entries, self._initial_others, strict=True
            ):
                opened.choose(index, initial)
        self._close_shard([0.0] * metrics)

    def _open_shard(self, shard: int) -> _OpenShard:
        merges, node = self._tree.merges((shard, shard + 1), self._sums)
        siblings = [(self._sums[sibling].values, is_left) for sibling, is_left in merges]
        target = siblings[-1][0] if siblings else self._layout.no_entries()
        uses = torch.zeros(len(self._layout.parameters), dtype=torch.float64)
        return _OpenShard(shard, node, tuple(merges), siblings, target, uses)

    def _shard(self) -> _OpenShard:
        if self._open is None:
            raise ConflictError("no shard is being computed")
        return self._open

    def _close_shard(self, metrics: list[Metric]) -> None:
        shard, self._open = self._shard(), None
        total = NodeSum(shard.target, shard.uses, {shard.number: metrics})
        for sibling, _ in shard.merges:
            merged = self._sums.pop(sibling)
            total.uses += merged.uses
            total.metrics |= merged.metrics
        self._sums[shard.node] = total

    def _discard_unfinished_shard(self) -> None:
        """Forget a shard that was given up half-way, and the sums into which some of it was already added."""
        shard, self._open = self._open, None
        if shard is not None and shard.is_touched:
            for sibling, _ in shard.merges:
                del self._sums[sibling]

    def parameter_sums(self, total: Entries) -> list[torch.Tensor]:
        """The summed gradients of the parameters in `total`, not their copies."""
        return entries_at(total, self._layout.parameter_entries)

    def install(self, total: Entries, used: Sequence[bool]) -> None:
        """Make the step's sum the model's gradient and advance the buffers.

        A parameter that no shard used gets no gradient, so that optimizers leave it alone.
        """
        layout = self._layout
        gradients = entries_at(total, layout.parameter_entries)
        for parameter, gradient, is_used in zip(layout.parameters, gradients, used, strict=True):
            parameter.grad = gradient.to(parameter.dtype) if is_used else None
        with torch.no_grad():
            changes = entries_at(total, layout.float_buffer_entries)
            floats = zip(layout.float_buffers, self._initial_floats, changes, strict=True)
            for buffer, initial, change in floats:
                buffer.copy_(initial + change)
            others = entries_at(total, layout.other_buffer_entries)
            for buffer, value in zip(layout.other_buffers, others, strict=True):
                buffer.copy_(value)


@dataclass(slots=True)
class _OpenShard:
    """A shard that is being computed, and the sums to which it is added.

    `merges` are the complete sibling nodes that the shard joins on its way up the tree to `node`, each with
    whether it is the left sibling; `siblings` are their values. The sum at `node` will be in `target`: the
    memory of the last sibling, if there is one, or the send buffer.
    """

    number: int
    node: Node
    merges: tuple[tuple[Node, bool], ...]
    siblings: list[tuple[Entries, bool]]
    target: Entries
    uses: torch.Tensor
    taken: list[bool] = field(init=False)
    earlier: dict[int, torch.Tensor] = field(default_factory=dict)
    """Parameter → the sum of its gradient over the micro-batches before the current one."""
    is_touched: bool = False
    """Whether some of the shard may have been added to its siblings' sums."""

    def __post_init__(self) -> None:
        self.taken = [False] * self.uses.numel()

    def add(self, index: EntryIndex, value: torch.Tensor) -> None:
        """Add an entry along the tree. A sum does not depend on which of its two sides it is stored in."""
        group, entry = index
        if not self.siblings:
            self.target[group][entry] = value
            return
        for values, _ in self.siblings[:-1]:
            value = values[group][entry].add_(value)
        torch.add(self.siblings[-1][0][group][entry], value, out=self.target[group][entry])

    def choose(self, index: EntryIndex, value: torch.Tensor) -> None:
        """Of an entry that is not summed, keep the value of the leftmost shard."""
        group, entry = index
        for values, is_left in self.siblings:
            if is_left:
                value = values[group][entry]
        if self.siblings:
            self.target[group][entry].copy_(value)
        else:
            self.target[group][entry] = value.clone()


def usage_and_metrics(
    sums: Sequence[NodeSum], parameters: int, shards: int, metrics: int
) -> torch.Tensor:
    """How many shards used each parameter, then each shard's metrics, as far as they are known here.

    Summed over all members this is complete, and exact: each shard's metrics come from one member, and are zero
    on the others. Metrics that are still on a device are read together, with one wait.
    """
    uses = torch.zeros(parameters, dtype=torch.float64)
    table = torch.zeros(shards, metrics, dtype=torch.float64)
    unread: list[tuple[int, int, torch.Tensor]] = []
    for each in sums:
        uses += each.uses
        for shard, values in each.metrics.items():
            numbers = [0.0 if isinstance(value, torch.Tensor) else value for value in values]
            table[shard] = torch.tensor(numbers, dtype=torch.float64)
            unread += [(shard, n, v) for n, v in enumerate(values) if isinstance(v, torch.Tensor)]
    if unread:
        table[[shard for shard, _, _ in unread], [number for _, number, _ in unread]] = torch.stack(
            [value for _, _, value in unread]
        ).cpu()
    return torch.cat([uses, table.view(-1)])


def _dense(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.dtype != parameter.dtype:
        raise InvalidInputError(
            f"a gradient of {gradient.dtype} for a parameter of {parameter.dtype}: they must agree"
        )
    return gradient.detach().contiguous()
