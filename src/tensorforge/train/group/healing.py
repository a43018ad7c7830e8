"""Sends the state to newcomers: raw tensors, from several donors at once.

The state is sent in rounds of at most `ROUND_BYTES` bytes. In each round every donor sends its own part to
every newcomer, so all donors send about as much, and no disk is involved. Everything runs inside the group
of the new generation: if a member dies meanwhile, the group is aborted and the next generation begins
again. A state on a device is sent through host memory, a round at a time; a newcomer receives the state
into host memory and takes it over when it is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from tensorforge.train.group.fabric import Wait
from tensorforge.train.group.generation_group import GenerationGroup
from tensorforge.train.group.host_staging import HostBuffer, HostStaging, flat_bytes
from tensorforge.train.loop.flat_state import FlatState, empty_like_header

ROUND_BYTES = 8 << 20
_IN_FLIGHT = 2

ByteRange = tuple[int, int, int]
"""Bytes of a tensor: the number of the tensor, start, stop."""


def rounds(sizes: Sequence[int], limit: int = ROUND_BYTES) -> Iterator[list[ByteRange]]:
    """Divide tensors of `sizes` bytes into rounds of at most `limit` bytes; small tensors share a round."""
    ranges: list[ByteRange] = []
    left = limit
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + left)
            ranges.append((index, start, stop))
            left -= stop - start
            start = stop
            if left == 0:
                yield ranges
                ranges, left = [], limit
    if ranges:
        yield ranges


def donate(
    group: GenerationGroup,
    state: FlatState,
    donors: Sequence[int],
    newcomers: Sequence[int],
) -> int:
    """Send this donor's part of `state` to the newcomers; return the number of bytes sent."""
    group.gather_bytes(state.header() if group.rank == donors[0] else b"")
    views = [flat_bytes(tensor) for tensor in state.tensors]
    number, sent = donors.index(group.rank), 0
    memory = _RoundMemory(views)
    window: deque[Wait] = deque()
    for ranges in rounds([view.numel() for view in views]):
        packed = memory.pack(ranges)
        bounds = _bounds(packed.numel(), len(donors))
        part = packed[bounds[number] : bounds[number + 1]]
        outgoing = part if len(newcomers) == 1 else part.repeat(len(newcomers))
        sizes = [part.numel() if rank in newcomers else 0 for rank in range(group.world_size)]
        nothing = torch.empty(0, dtype=torch.uint8)
        window.append(
            group.votes.start_all_to_all(nothing, outgoing, [0] * group.world_size, sizes)
        )
        sent += outgoing.numel()
        if len(window) > _IN_FLIGHT:
            window.popleft()()
            memory.reuse_oldest()
    for wait in window:
        wait()
    return sent


def receive(group: GenerationGroup, donors: Sequence[int]) -> tuple[FlatState, int]:
    """Receive the donors' state; return it and the number of bytes received."""
    state = empty_like_header(group.gather_bytes(b"")[donors[0]])
    views = [tensor.reshape(-1).view(torch.uint8) for tensor in state.tensors]
    window: deque[tuple[Wait, list[ByteRange], torch.Tensor]] = deque()
    received = 0
    nothing = torch.empty(0, dtype=torch.uint8)
    for ranges in rounds([view.numel() for view in views]):
        buffer = torch.empty(sum(stop - start for _, start, stop in ranges), dtype=torch.uint8)
        bounds = _bounds(buffer.numel(), len(donors))
        sizes = [0] * group.world_size
        for number, donor in enumerate(donors):
            sizes[donor] = bounds[number + 1] - bounds[number]
        wait = group.votes.start_all_to_all(buffer, nothing, sizes, [0] * group.world_size)
        window.append((wait, ranges, buffer))
        received += buffer.numel()
        if len(window) > _IN_FLIGHT:
            _unpack(views, *window.popleft())
    for waiting in window:
        _unpack(views, *waiting)
    return state, received


def _bounds(size: int, parts: int) -> list[int]:
    return [size * part // parts for part in range(parts + 1)]


def _pack(views: Sequence[torch.Tensor], ranges: Sequence[ByteRange]) -> torch.Tensor:
    if len(ranges) == 1:
        index, start, stop = ranges[0]
        return views[index][start:stop]
    return torch.cat([views[index][start:stop] for index, start, stop in ranges])


class _RoundMemory:
    """Brings rounds of `views` into host memory. Nothing is copied that is contiguous there already."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self._views = views
        devices = [view.device for view in views if view.device.type != "cpu"]
        self._staging = HostStaging(devices[0]) if devices else None
        self._lent: deque[HostBuffer] = deque()

    def pack(self, ranges: Sequence[ByteRange]) -> torch.Tensor:
        """The bytes of one round, in host memory."""
        if self._staging is None:
            return _pack(self._views, ranges)
        size = sum(stop - start for _, start, stop in ranges)
        buffer, offset = self._staging.lend(size), 0
        for index, start, stop in ranges:
            target = buffer.memory[offset : offset + stop - start]
            target.copy_(self._views[index][start:stop], non_blocking=True)
            offset += stop - start
        self._staging.mark(buffer)
        buffer.wait()
        self._lent.append(buffer)
        return buffer.memory[:size]

    def reuse_oldest(self) -> None:
        """Say that the oldest round in use has been sent."""
        if self._staging is not None:
            self._staging.give_back(self._lent.popleft())


def _unpack(
    views: Sequence[torch.Tensor],
    wait: Wait,
    ranges: Sequence[ByteRange],
    buffer: torch.Tensor,
) -> None:
    wait()
    offset = 0
    for index, start, stop in ranges:
        views[index][start:stop] = buffer[offset : offset + stop - start]
        offset += stop - start
