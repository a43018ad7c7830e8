"""Who computes which shard while shards move. Pure; every member comes to the same answer.

A shard has an owner by the plan, and a place: the member that computes it now. As long as its bytes are
still on their way to the owner, whoever holds them goes on computing it; it changes hands between two steps,
when the owner has said in a vote that they arrived.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def single_holders(shards: int, held: Sequence[Collection[int]]) -> list[list[int]]:
    """For each member, the shards that count as its own: of several holders one, so that loads are even.

    Shards that few hold are given away first.
    """
    holders: list[list[int]] = [
        [rank for rank, own in enumerate(held) if shard in own] for shard in range(shards)
    ]
    owned: list[list[int]] = [[] for _ in held]
    for shard in sorted(range(shards), key=lambda number: (len(holders[number]), number)):
        if holders[shard]:
            rank = min(holders[shard], key=lambda rank: (len(owned[rank]), rank))
            owned[rank].append(shard)
    return [sorted(own) for own in owned]


class Placement:
    """The owners and places of all shards in one generation; `held` is what each member has at its start."""

    def __init__(self, owners: Sequence[int], held: Sequence[Collection[int]]) -> None:
        self.owners = tuple(owners)
        self.places = [
            owner if shard in held[owner] else _holder(shard, held, owner)
            for shard, owner in enumerate(owners)
        ]

    @property
    def is_settled(self) -> bool:
        """Whether every shard is computed by its owner."""
        return tuple(self.places) == self.owners

    def arrived(self, rank: int, held: Collection[int]) -> list[int]:
        """For each shard, 1 if `rank` owns it, now holds it, and somebody else still computes it."""
        return [
            int(owner == rank and place != rank and shard in held)
            for shard, (owner, place) in enumerate(zip(self.owners, self.places, strict=True))
        ]

    def hand_over(self, arrived: Sequence[int]) -> bool:
        """Shards that have arrived change hands; whether there were any."""
        changed = [shard for shard, count in enumerate(arrived) if count]
        for shard in changed:
            self.places[shard] = self.owners[shard]
        return bool(changed)

    def needed_by(self, rank: int) -> set[int]:
        """The shards that `rank` owns or computes: what it must not delete."""
        return {
            shard
            for shard, pair in enumerate(zip(self.owners, self.places, strict=True))
            if rank in pair
        }


def _holder(shard: int, held: Sequence[Collection[int]], owner: int) -> int:
    """A member that has the shard; where nobody has it, its owner reads from the origin."""
    return next((rank for rank, own in enumerate(held) if shard in own), owner)
