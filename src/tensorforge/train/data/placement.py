"""Which member computes which shard while shards move between members. Pure.

The plan gives each shard an owner. Until the shard's bytes have arrived at the owner, a member that stores
the shard goes on computing it. The owner says in the vote of a step that the shard has arrived, and
computes it from the next step on. Every member computes the same placement.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def single_holders(shards: int, stored: Sequence[Collection[int]]) -> list[list[int]]:
    """Assign each stored shard to one of the members that store it, so that all get about as many.

    `stored` are the shards of each member. Shards that few members store are assigned first.
    """
    holders: list[list[int]] = [
        [rank for rank, own in enumerate(stored) if shard in own] for shard in range(shards)
    ]
    assigned: list[list[int]] = [[] for _ in stored]
    for shard in sorted(range(shards), key=lambda number: (len(holders[number]), number)):
        if holders[shard]:
            rank = min(holders[shard], key=lambda rank: (len(assigned[rank]), rank))
            assigned[rank].append(shard)
    return [sorted(own) for own in assigned]


class Placement:
    """For each shard in one generation, its owner and the member that computes it now.

    `stored` are the shards that each member stores when the generation begins.
    """

    def __init__(self, owners: Sequence[int], stored: Sequence[Collection[int]]) -> None:
        self.owners = tuple(owners)
        self.computed_by = [
            owner if shard in stored[owner] else _holder(shard, stored, owner)
            for shard, owner in enumerate(owners)
        ]

    @property
    def is_settled(self) -> bool:
        """Whether every shard is computed by its owner."""
        return tuple(self.computed_by) == self.owners

    def arrivals(self, rank: int, stored: Collection[int]) -> list[int]:
        """For each shard, 1 if its owner `rank` stores it now but another member computes it, otherwise 0."""
        return [
            int(owner == rank and computing != rank and shard in stored)
            for shard, (owner, computing) in enumerate(
                zip(self.owners, self.computed_by, strict=True)
            )
        ]

    def follow_arrivals(self, arrived: Sequence[int]) -> None:
        """Let the owners compute the shards whose count in `arrived` is not 0."""
        for shard, count in enumerate(arrived):
            if count:
                self.computed_by[shard] = self.owners[shard]

    def needed_by(self, rank: int) -> set[int]:
        """The shards that `rank` owns or computes, so that it must not delete them."""
        return {
            shard
            for shard, pair in enumerate(zip(self.owners, self.computed_by, strict=True))
            if rank in pair
        }


def _holder(shard: int, stored: Sequence[Collection[int]], owner: int) -> int:
    """The first member that stores the shard; if none does, the owner, who reads it from the origin."""
    return next((rank for rank, own in enumerate(stored) if shard in own), owner)
