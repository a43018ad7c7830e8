"""The group of one generation: a fabric of the CPU for votes and facts, and one for the bulk of the data."""

from __future__ import annotations

import torch

from tensorforge.train.group.fabric import Fabric, all_gather, gather_bytes
from tensorforge.train.group.gloo_fabric import GlooFabric
from tensorforge.train.group.staged_fabric import StagedFabric


class GenerationGroup:
    """The members of one generation. `votes` carries tensors of the CPU, `bulk` those of the model's device.

    Both may be one fabric. `abort` may be called by any thread and ends the operations of both.
    """

    def __init__(self, votes: Fabric, bulk: Fabric | None = None) -> None:
        self.votes = votes
        self.bulk = votes if bulk is None else bulk
        self._fabrics = (votes,) if self.bulk is votes else (votes, self.bulk)
        self.generation = votes.generation
        self.rank = votes.rank
        self.world_size = votes.world_size

    @classmethod
    def over_gloo(
        cls,
        device: torch.device,
        *,
        store: str,
        generation: int,
        rank: int,
        world_size: int,
        host: str,
    ) -> GenerationGroup:
        """A group over gloo. Tensors of a device other than the CPU are staged through host memory."""
        votes = GlooFabric(
            store=store, generation=generation, rank=rank, world_size=world_size, host=host
        )
        return cls(votes, None if device.type == "cpu" else StagedFabric(votes, device))

    @property
    def is_aborted(self) -> bool:
        """Whether the group cannot be used any more."""
        return any(fabric.is_aborted for fabric in self._fabrics)

    def form(self) -> None:
        """Connect to all members. Raise `GroupAbortedError` if aborted or if a member does not come in time."""
        for fabric in self._fabrics:
            fabric.form()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor of the CPU over all members, in place."""
        self.votes.all_reduce(tensor)

    def all_gather(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        """Concatenate the members' equally long `tensor`s of the CPU in `into`, by rank."""
        all_gather(self.votes, into, tensor)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every member's `data`, by rank, on every member."""
        return gather_bytes(self.votes, data)

    def abort(self, reason: str) -> None:
        """Make every current and later operation raise. Never blocks; doing it again changes nothing."""
        for fabric in self._fabrics:
            fabric.abort(reason)

    def close(self) -> None:
        """Abort the group and drop it in the background."""
        for fabric in self._fabrics:
            fabric.close()
