"""Which member computes which shards of a step, and what is kept of a failed attempt. Pure.

Every member computes the same division from the same inputs, so the members need not send it to each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tensorforge.errors import InvalidInputError
from tensorforge.train.gradients.shard_tree import Node, ShardTree


@dataclass(frozen=True, slots=True)
class Share:
    """One member's part of a step: nodes that it has finished already, and shards that it has to compute."""

    kept: tuple[Node, ...]
    compute: tuple[int, ...]

    def nodes(self, tree: ShardTree) -> tuple[Node, ...]:
        """The nodes that the member has when it is done, in order."""
        return tree.merged((*self.kept, *((shard, shard + 1) for shard in self.compute)))


def share_work(
    tree: ShardTree,
    finished: Sequence[Collection[Node]],
    computed_by: Sequence[int] | None = None,
) -> tuple[Share, ...]:
    """Divide a step among `len(finished)` members, each of which has finished some nodes already.

    A finished node stays with its member; if two members have finished the same shard, the lower rank keeps
    its node and the node of the other one is dropped. The missing shards are divided evenly into contiguous
    runs, so that each member adds up few subtrees. `computed_by`, if given, says instead which member
    computes each shard.
    """
    if not finished:
        raise InvalidInputError("finished: a step needs at least one member")
    taken: set[int] = set()
    kept: list[tuple[Node, ...]] = []
    for nodes in finished:
        own = []
        for low, high in sorted(nodes):
            shards = set(range(low, high))
            if (low, high) in tree and not shards & taken:
                taken |= shards
                own.append((low, high))
        kept.append(tuple(own))
    missing = [shard for shard in range(tree.shards) if shard not in taken]
    members = range(len(finished))
    if computed_by is not None:
        runs = [[shard for shard in missing if computed_by[shard] == rank] for rank in members]
    else:
        bounds = [len(missing) * rank // len(members) for rank in range(len(members) + 1)]
        runs = [missing[bounds[rank] : bounds[rank + 1]] for rank in members]
    return tuple(Share(kept[rank], tuple(runs[rank])) for rank in members)
