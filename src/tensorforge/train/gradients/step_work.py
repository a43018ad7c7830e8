"""Who computes which shards of a step, and what is kept of a failed attempt. Pure.

Every member computes the same answer from the same facts, so nothing more has to be agreed on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tensorforge.errors import InvalidInputError
from tensorforge.train.gradients.shard_tree import Node, ShardTree


@dataclass(frozen=True, slots=True)
class Share:
    """One member's part of a step: nodes that it holds already, shards that it has to compute."""

    kept: tuple[Node, ...]
    compute: tuple[int, ...]

    def nodes(self, tree: ShardTree) -> tuple[Node, ...]:
        """The parts that the member holds when it is done, in order."""
        return tree.merged((*self.kept, *((shard, shard + 1) for shard in self.compute)))


def share_work(
    tree: ShardTree, held: Sequence[Collection[Node]], places: Sequence[int] | None = None
) -> tuple[Share, ...]:
    """Divide a step among `len(held)` members, of which each one holds some nodes already.

    What is held is kept where it is; if two hold the same shard, the lower rank keeps its node and the
    other one's is dropped. The missing shards are dealt out evenly as contiguous runs, so that with
    nothing held everybody gets one block, which adds up to few subtrees. `places` says instead which
    member computes each shard.
    """
    if not held:
        raise InvalidInputError("held: a step needs at least one member")
    taken: set[int] = set()
    kept: list[tuple[Node, ...]] = []
    for nodes in held:
        mine = []
        for low, high in sorted(nodes):
            shards = set(range(low, high))
            if (low, high) in tree and not shards & taken:
                taken |= shards
                mine.append((low, high))
        kept.append(tuple(mine))
    missing = [shard for shard in range(tree.shards) if shard not in taken]
    members = len(held)
    if places is not None:
        return tuple(
            Share(kept[rank], tuple(shard for shard in missing if places[shard] == rank))
            for rank in range(members)
        )
    bounds = [len(missing) * rank // members for rank in range(members + 1)]
    return tuple(
        Share(kept[rank], tuple(missing[bounds[rank] : bounds[rank + 1]]))
        for rank in range(members)
    )
