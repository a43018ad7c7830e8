"""The collective operations that training needs, whatever carries them.

A fabric belongs to one generation. Members start the same operations in the same order. Results are written
by the stream that is current where an operation is waited for; on the CPU they are there when the wait returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tensorforge.errors import UnavailableError

Wait = Callable[[], None]
"""Waits for an operation that was started; raises `GroupAbortedError` if it cannot be completed."""


class GroupAbortedError(UnavailableError):
    """The group cannot be used any more: it was aborted, or the connection to a peer broke."""


class Fabric(Protocol):
    """Moves tensors between the members of one generation. `form` connects it; one thread at a time uses it.

    `abort` may be called by any thread at any time, also while the fabric is being formed; every wait then
    ends with `GroupAbortedError`, and so does every later operation. Memory of an operation that was aborted
    may still be read and written until the fabric is gone, so it must not be used for anything else.
    """

    @property
    def generation(self) -> int:
        """The generation that the fabric belongs to."""
        ...

    @property
    def rank(self) -> int:
        """This member's rank."""
        ...

    @property
    def world_size(self) -> int:
        """The number of members."""
        ...

    @property
    def is_aborted(self) -> bool:
        """Whether the fabric cannot be used any more."""
        ...

    def form(self) -> None:
        """Connect to all members. Raise `GroupAbortedError` if aborted or if a member does not come in time."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over all members, in place."""
        ...

    def start_all_gather(self, into: torch.Tensor, tensor: torch.Tensor) -> Wait:
        """Start to concatenate the members' equally long `tensor`s in `into`, by rank."""
        ...

    def start_all_to_all(
        self,
        into: torch.Tensor,
        tensor: torch.Tensor,
        receive: Sequence[int],
        send: Sequence[int],
    ) -> Wait:
        """Start to send `send[rank]` elements of `tensor` to each member and to receive `receive[rank]`.

        What is received is concatenated in `into`, by rank.
        """
        ...

    def abort(self, reason: str) -> None:
        """Make every current and later operation raise. Never blocks; doing it again changes nothing."""
        ...

    def close(self) -> None:
        """Abort the fabric and drop it in the background."""
        ...


def all_gather(fabric: Fabric, into: torch.Tensor, tensor: torch.Tensor) -> None:
    """Concatenate the members' equally long `tensor`s in `into`, by rank."""
    fabric.start_all_gather(into, tensor)()


def gather_bytes(fabric: Fabric, data: bytes) -> list[bytes]:
    """Return every member's `data`, by rank, on every member. The fabric must carry tensors of the CPU."""
    sizes = torch.zeros(fabric.world_size, dtype=torch.int64)
    all_gather(fabric, sizes, torch.tensor([len(data)], dtype=torch.int64))
    width = int(sizes.max())
    if width == 0:
        return [b""] * fabric.world_size
    padded = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
    gathered = torch.empty(fabric.world_size * width, dtype=torch.uint8)
    all_gather(fabric, gathered, padded)
    rows = gathered.view(fabric.world_size, width).numpy()
    return [bytes(rows[rank, : int(sizes[rank])]) for rank in range(fabric.world_size)]
