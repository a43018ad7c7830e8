"""The sum over all members, along the tree, moving as little as a ring all-reduce does.

Every member holds the sums of some nodes. The flat gradient is cut into one slice per member; each member
sends to each other one that one's slice of its nodes, adds up the whole tree for its own slice, and the
finished slices are gathered. With one node per member this moves what a ring all-reduce moves; with k nodes
the first half costs k times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tensorforge.train.gradients import Contribution
from tensorforge.train.group import GenerationGroup, GroupAbortedError
from tensorforge.train.layout import Group, Layout, Split
from tensorforge.train.tree import Node, ShardTree

_SLICE_ALIGNMENT = 16


class TreeReduction:
    """Reduces steps of one layout. Reuses its memory from step to step: a result holds until the next."""

    def __init__(self, layout: Layout, tree: ShardTree) -> None:
        self._layout = layout
        self._tree = tree
        self._memory: dict[tuple[int, str], torch.Tensor] = {}

    def reduce(
        self,
        group: GenerationGroup | None,
        nodes: Sequence[Sequence[Node]],
        mine: Sequence[Contribution],
    ) -> Split:
        """The tensors at the root. `nodes` are each member's, `mine` the contributions of ours.

        `GroupAbortedError` if the group breaks; `mine` is left as it was.
        """
        if group is None or group.world_size == 1:
            return mine[0].tensors
        try:
            return self._reduce(group, nodes, mine)
        except GroupAbortedError:
            # gloo may still write into what the dead operations hold: never use it again.
            self._memory.clear()
            raise

    def _reduce(
        self,
        group: GenerationGroup,
        nodes: Sequence[Sequence[Node]],
        mine: Sequence[Contribution],
    ) -> Split:
        exchanges = [
            self._start_exchange(group, index, part, nodes, [c.tensors[index] for c in mine])
            for index, part in enumerate(self._layout.groups)
        ]
        result: Split = []
        for index, (part, finish) in enumerate(zip(self._layout.groups, exchanges, strict=True)):
            finished = finish()
            total = self._take(index, "total", finished.numel() * group.world_size, part.dtype)
            group.all_gather(total, finished)
            result.append(part.views(total))
        return result

    def _start_exchange(
        self,
        group: GenerationGroup,
        index: int,
        part: Group,
        nodes: Sequence[Sequence[Node]],
        mine: Sequence[Sequence[torch.Tensor]],
    ) -> Callable[[], torch.Tensor]:
        members = group.world_size
        width = -(-part.size // (members * _SLICE_ALIGNMENT)) * _SLICE_ALIGNMENT
        outgoing = self._outgoing(index, part, mine, members, width)
        counts = [len(held) for held in nodes]
        incoming = self._take(index, "incoming", sum(counts) * width, part.dtype)
        wait = group.start_all_to_all(
            incoming, outgoing, [count * width for count in counts], [len(mine) * width] * members
        )

        def finish() -> torch.Tensor:
            wait()
            slices = iter(incoming.view(-1, width).unbind())
            parts = {node: next(slices) for held in nodes for node in held}
            return self._tree.fold(parts, _add if part.summed else _first)

        return finish

    def _outgoing(
        self,
        index: int,
        part: Group,
        mine: Sequence[Sequence[torch.Tensor]],
        members: int,
        width: int,
    ) -> torch.Tensor:
        """Our nodes' slices, sorted by destination."""
        flat = self._take(index, "outgoing", len(mine) * members * width, part.dtype)
        if len(mine) == 1:
            part.pack(mine[0], flat)
            return flat
        scratch = self._take(index, "scratch", members * width, part.dtype)
        by_destination = flat.view(members, len(mine), width)
        for place, tensors in enumerate(mine):
            part.pack(tensors, scratch)
            by_destination[:, place].copy_(scratch.view(members, width))
        return flat

    def _take(self, index: int, purpose: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        memory = self._memory.get((index, purpose))
        if memory is None or memory.numel() < size:
            # Zeros: the gaps between entries are sent too, and nobody should wonder what is in them.
            memory = self._memory[index, purpose] = torch.zeros(size, dtype=dtype)
        return memory[:size]


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.add_(right)


def _first(left: torch.Tensor, _right: torch.Tensor) -> torch.Tensor:
    return left
