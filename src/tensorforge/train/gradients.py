"""The gradient of one step: a value per shard, added up along the tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tensorforge.errors import InvalidInputError
from tensorforge.train.layout import Layout, Split
from tensorforge.train.tree import Node, ShardTree, TreeSum


@dataclass(slots=True)
class Contribution:
    """What a node of the tree gives to the step: tensors by group, and which parameters had a gradient."""

    tensors: Split
    present: torch.Tensor
    metrics: dict[int, list[float]] = field(default_factory=dict)
    """Shard → its metrics, weighted; shards keep their own values so that sums do not depend on who adds."""


class StepGradients:
    """Collects the shards' contributions to one step and remembers them until the step is committed.

    Between `begin_shard` and `end_shard` the model's buffers start from the step's initial values, and its
    parameters' `.grad` collects one shard's gradient alone.
    """

    def __init__(self, layout: Layout, tree: ShardTree) -> None:
        self._layout = layout
        self._sum: TreeSum[Contribution] = TreeSum(tree, _adder(layout))
        self._initial_moving = [buffer.detach().clone() for buffer in layout.moving]
        self._initial_fixed = [buffer.detach().clone() for buffer in layout.fixed]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that are complete here, in order."""
        return tuple(sorted(self._sum.parts))

    def parts(self, nodes: Sequence[Node]) -> list[Contribution]:
        """The contributions of `nodes`; each must be complete here."""
        return [self._sum.parts[node] for node in nodes]

    def keep_only(self, nodes: Sequence[Node]) -> None:
        """Forget all nodes but these."""
        wanted = set(nodes)
        for node in [node for node in self._sum.parts if node not in wanted]:
            del self._sum.parts[node]

    def begin_shard(self) -> None:
        """Make the model ready for one shard."""
        self.restore_buffers()
        for parameter in self._layout.parameters:
            parameter.grad = None

    def restore_buffers(self) -> None:
        """Give the buffers their values from before the step."""
        layout = self._layout
        with torch.no_grad():
            for buffer, initial in zip(layout.moving, self._initial_moving, strict=True):
                buffer.copy_(initial)
            for buffer, initial in zip(layout.fixed, self._initial_fixed, strict=True):
                buffer.copy_(initial)

    def end_shard(self, shard: int, share: float, metrics: list[float]) -> None:
        """Take the shard's gradient and buffers; `share` is its part of the step's samples."""
        layout = self._layout
        gradients = [_dense_gradient(parameter) for parameter in layout.parameters]
        present = torch.tensor([p.grad is not None for p in layout.parameters], dtype=torch.float64)
        with torch.no_grad():
            changes = [
                (buffer - initial).mul_(share)
                for buffer, initial in zip(layout.moving, self._initial_moving, strict=True)
            ]
            fixed = [buffer.clone() for buffer in layout.fixed]
        for parameter in layout.parameters:
            parameter.grad = None
        tensors = layout.split([*gradients, *changes], fixed)
        self._sum.put((shard, shard + 1), Contribution(tensors, present, {shard: metrics}))

    def put_nothing(self, shard: int, metrics: int) -> None:
        """A shard without samples in this step: it counts as zero."""
        layout = self._layout
        zeros = [torch.zeros_like(t, requires_grad=False) for t in layout.parameters]
        still = [torch.zeros_like(buffer) for buffer in layout.moving]
        fixed = [initial.clone() for initial in self._initial_fixed]
        present = torch.zeros(len(layout.parameters), dtype=torch.float64)
        tensors = layout.split([*zeros, *still], fixed)
        values = {shard: [0.0] * metrics}
        self._sum.put((shard, shard + 1), Contribution(tensors, present, values))

    def install(self, total: Split, present: Sequence[bool]) -> None:
        """Make the step's sum the model's gradient and advance the buffers.

        A parameter that no shard used has no gradient, so that optimizers leave it alone.
        """
        layout = self._layout
        summed, fixed = layout.join(total)
        count = len(layout.parameters)
        gradients, changes = summed[:count], summed[count:]
        for parameter, gradient, used in zip(layout.parameters, gradients, present, strict=True):
            parameter.grad = gradient if used else None
        with torch.no_grad():
            before = zip(layout.moving, self._initial_moving, changes, strict=True)
            for buffer, initial, change in before:
                buffer.copy_(initial + change)
            for buffer, value in zip(layout.fixed, fixed, strict=True):
                buffer.copy_(value)


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


def _adder(layout: Layout) -> Callable[[Contribution, Contribution], Contribution]:
    """Adds the right contribution to the left one, in the left one's memory."""

    def add(left: Contribution, right: Contribution) -> Contribution:
        for group, ours, theirs in zip(layout.groups, left.tensors, right.tensors, strict=True):
            if group.summed:
                torch._foreach_add_(ours, theirs)
        left.present += right.present
        left.metrics |= right.metrics
        return left

    return add


def _dense_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter, requires_grad=False)
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.dtype != parameter.dtype:
        raise InvalidInputError(
            f"a gradient of {gradient.dtype} for a parameter of {parameter.dtype}: they must agree"
        )
    return gradient.detach().contiguous()
