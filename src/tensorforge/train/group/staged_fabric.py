"""Carries tensors of a device over a fabric that reads only host memory.

Each operation copies its tensor to a pinned buffer, waits for the event after that copy, and gives the buffer
to the other fabric. The wait of an operation copies what was received to the device. Callers move data in
pieces (buckets), so buffers have the size of a piece, and a few of them are used again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tensorforge.train.group.fabric import Fabric, Wait
from tensorforge.train.group.host_staging import HostStaging


class StagedFabric:
    """A fabric of `device` over `host`, a fabric of the CPU, which it forms, aborts and closes only with it."""

    def __init__(self, host: Fabric, device: torch.device) -> None:
        self._host = host
        self._staging = HostStaging(device)
        self.generation = host.generation
        self.rank = host.rank
        self.world_size = host.world_size

    @property
    def is_aborted(self) -> bool:
        """Whether the fabric cannot be used any more."""
        return self._host.is_aborted

    def form(self) -> None:
        """Do nothing: the host's fabric is formed by its owner."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over all members, in place."""
        staged = self._staging.stage(tensor)
        staged.wait()
        self._host.all_reduce(staged.view(tensor.numel(), tensor.dtype))
        self._staging.unstage(staged, tensor)

    def start_all_gather(self, into: torch.Tensor, tensor: torch.Tensor) -> Wait:
        """Start to concatenate the members' equally long `tensor`s in `into`, by rank."""
        return self._started(into, tensor, self._host.start_all_gather)

    def start_all_to_all(
        self,
        into: torch.Tensor,
        tensor: torch.Tensor,
        receive: Sequence[int],
        send: Sequence[int],
    ) -> Wait:
        """Start to send `send[rank]` elements of `tensor` to each member and to receive `receive[rank]`."""
        return self._started(
            into,
            tensor,
            lambda received, sent: self._host.start_all_to_all(received, sent, receive, send),
        )

    def _started(
        self,
        into: torch.Tensor,
        tensor: torch.Tensor,
        start: Callable[[torch.Tensor, torch.Tensor], Wait],
    ) -> Wait:
        """Start an operation of the host's fabric on copies of the two tensors."""
        sent = self._staging.stage(tensor)
        received = self._staging.lend(into.numel() * into.dtype.itemsize)
        sent.wait()
        wait = start(
            received.view(into.numel(), into.dtype), sent.view(tensor.numel(), tensor.dtype)
        )

        def finish() -> None:
            wait()
            self._staging.give_back(sent)
            self._staging.unstage(received, into)

        return finish

    def abort(self, reason: str) -> None:
        """Abort the host's fabric."""
        self._host.abort(reason)

    def close(self) -> None:
        """Close the host's fabric."""
        self._host.close()
