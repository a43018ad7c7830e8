"""A fabric inside one process whose operations end as late as possible and in an odd order.

Nothing is moved when an operation is started. The first wait for an operation that all members have started
ends operations in a shuffled order until that one has ended. Until then the memory to be written holds values
that nobody computed, and what is sent is read only then. So a member that reads too early, or changes too early
what it sends, gets wrong numbers, on a machine of any speed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tensorforge.train.group.fabric import GroupAbortedError, Wait

_POISON = 0xFF


@dataclass(slots=True)
class _Part:
    """What one member brings to an operation."""

    into: torch.Tensor
    tensor: torch.Tensor
    receive: Sequence[int]
    send: Sequence[int]


@dataclass(slots=True)
class _Operation:
    """The parts of the members that have started the operation, by rank, and whether it has ended."""

    move: Callable[[list[_Part]], None]
    parts: dict[int, _Part] = field(default_factory=dict)
    is_done: bool = False


class DelayingNetwork:
    """Connects the members of one group. `abort_at` aborts the group when so many operations have ended."""

    def __init__(self, world_size: int, *, seed: int = 0, abort_at: int | None = None) -> None:
        self.world_size = world_size
        self._random = random.Random(seed)
        self._abort_at = abort_at
        self._ended = 0
        self._operations: list[_Operation] = []
        self.changed = threading.Condition()
        self.aborted: str | None = None

    def members(self) -> list[DelayingFabric]:
        """One fabric for each member."""
        return [DelayingFabric(self, rank) for rank in range(self.world_size)]

    def start(
        self, number: int, rank: int, part: _Part, move: Callable[[list[_Part]], None]
    ) -> None:
        """Let a member bring its part to operation `number`."""
        with self.changed:
            self.require_usable()
            if number == len(self._operations):
                self._operations.append(_Operation(move))
            self._operations[number].parts[rank] = part
            self.changed.notify_all()

    def wait(self, number: int) -> None:
        """Wait until operation `number` has ended, or raise `GroupAbortedError`."""
        with self.changed:
            operation = self._operations[number]
            while not operation.is_done:
                self.require_usable()
                if len(operation.parts) < self.world_size:
                    self.changed.wait()
                else:
                    self._end_one()

    def _end_one(self) -> None:
        """End any one of the operations that all members have started."""
        ready = [
            each
            for each in self._operations
            if len(each.parts) == self.world_size and not each.is_done
        ]
        chosen = self._random.choice(ready)
        chosen.move([chosen.parts[rank] for rank in range(self.world_size)])
        chosen.is_done = True
        self._ended += 1
        if self._ended == self._abort_at:
            self.aborted = f"aborted after {self._ended} operations"
        self.changed.notify_all()

    def require_usable(self) -> None:
        """Raise `GroupAbortedError` if the group was aborted."""
        if self.aborted is not None:
            raise GroupAbortedError(self.aborted)

    def abort(self, reason: str) -> None:
        """End all waits of all members."""
        with self.changed:
            self.aborted = self.aborted or reason
            self.changed.notify_all()


class DelayingFabric:
    """One member's fabric of a `DelayingNetwork`."""

    def __init__(self, network: DelayingNetwork, rank: int) -> None:
        self._network = network
        self._started = 0
        self.generation = 1
        self.rank = rank
        self.world_size = network.world_size

    @property
    def is_aborted(self) -> bool:
        """Whether the group was aborted, by any member."""
        return self._network.aborted is not None

    def form(self) -> None:
        """Do nothing but raise if the group was aborted."""
        self._network.require_usable()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over all members, in place."""
        self._begin(_Part(tensor, tensor, (), ()), _add_up)()

    def start_all_gather(self, into: torch.Tensor, tensor: torch.Tensor) -> Wait:
        """Start to concatenate the members' equally long `tensor`s in `into`, by rank."""
        _poison(into)
        return self._begin(_Part(into, tensor, (), ()), _gather)

    def start_all_to_all(
        self,
        into: torch.Tensor,
        tensor: torch.Tensor,
        receive: Sequence[int],
        send: Sequence[int],
    ) -> Wait:
        """Start to send `send[rank]` elements of `tensor` to each member and to receive `receive[rank]`."""
        _poison(into)
        return self._begin(_Part(into, tensor, list(receive), list(send)), _exchange)

    def _begin(self, part: _Part, move: Callable[[list[_Part]], None]) -> Wait:
        number, self._started = self._started, self._started + 1
        self._network.start(number, self.rank, part, move)
        return lambda: self._network.wait(number)

    def abort(self, reason: str) -> None:
        """End all waits of all members."""
        self._network.abort(reason)

    def close(self) -> None:
        """Abort the group."""
        self.abort("the group was closed")


def _poison(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8).fill_(_POISON)


def _add_up(parts: list[_Part]) -> None:
    total = torch.stack([part.tensor for part in parts]).sum(dim=0)
    for part in parts:
        part.into.copy_(total)


def _gather(parts: list[_Part]) -> None:
    gathered = torch.cat([part.tensor for part in parts])
    for part in parts:
        part.into.copy_(gathered)


def _exchange(parts: list[_Part]) -> None:
    sent = [torch.split_with_sizes(part.tensor, part.send) for part in parts]
    for rank, part in enumerate(parts):
        received = [pieces[rank] for pieces in sent]
        if [piece.numel() for piece in received] != list(part.receive):
            raise ValueError(f"rank {rank} expects {part.receive} elements and is sent others")
        part.into.copy_(torch.cat(received))
