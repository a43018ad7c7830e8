"""Bringing newcomers to the others' state: raw tensors from several donors at once, then a digest.

The state is cut into chunks; donors take turns, so each sends its part of the whole and no disk is
involved. Everything runs inside the new generation's group: if somebody dies meanwhile, all of it is
aborted and done again by the next generation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from tensorforge.errors import IntegrityError
from tensorforge.train.group import GenerationGroup
from tensorforge.train.state import FlatState, empty_like_header, tensor_bytes

CHUNK_BYTES = 4 << 20
_IN_FLIGHT = 4

Piece = tuple[int, int, int]
"""Bytes `[start, stop)` of a tensor: its number, start, stop."""


def chunks(sizes: Sequence[int], limit: int = CHUNK_BYTES) -> Iterator[list[Piece]]:
    """Cut tensors of `sizes` bytes into chunks of at most `limit` bytes; small ones share a chunk."""
    chunk: list[Piece] = []
    room = limit
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            chunk.append((index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield chunk
                chunk, room = [], limit
    if chunk:
        yield chunk


def donate(
    group: GenerationGroup,
    state: FlatState,
    donors: Sequence[int],
    newcomers: Sequence[int],
) -> int:
    """Send our part of `state` to the newcomers; returns the bytes sent."""
    if group.rank == donors[0]:
        _send_header(group, state.header(), newcomers)
    views = [tensor_bytes(tensor) for tensor in state.tensors]
    window: deque[tuple[Callable[[], None], torch.Tensor]] = deque()
    sent = 0
    for number, chunk in enumerate(chunks([view.numel() for view in views])):
        for place, newcomer in enumerate(newcomers):
            if donors[(number + place) % len(donors)] != group.rank:
                continue
            packed = _pack(views, chunk)
            window.append((group.start_send(packed, newcomer, _tag(number)), packed))
            sent += packed.numel()
            if len(window) > _IN_FLIGHT:
                window.popleft()[0]()
    for wait, _ in window:
        wait()
    return sent


def receive(
    group: GenerationGroup, donors: Sequence[int], newcomers: Sequence[int]
) -> tuple[FlatState, int]:
    """The donors' state and how many bytes came."""
    state = empty_like_header(_receive_header(group, donors[0]))
    views = [tensor.reshape(-1).view(torch.uint8) for tensor in state.tensors]
    place = newcomers.index(group.rank)
    window: deque[tuple[Callable[[], None], list[Piece], torch.Tensor]] = deque()
    received = 0
    for number, chunk in enumerate(chunks([view.numel() for view in views])):
        donor = donors[(number + place) % len(donors)]
        buffer = torch.empty(sum(stop - start for _, start, stop in chunk), dtype=torch.uint8)
        window.append((group.start_receive(buffer, donor, _tag(number)), chunk, buffer))
        received += buffer.numel()
        if len(window) > _IN_FLIGHT:
            _unpack(views, *window.popleft())
    for waiting in window:
        _unpack(views, *waiting)
    return state, received


def require_equal(digests: Sequence[bytes], step: int) -> None:
    """Raise `IntegrityError` unless all members have the same state."""
    if len(set(digests)) > 1:
        found = ", ".join(f"rank {rank}: {d.hex()[:12]}" for rank, d in enumerate(digests))
        raise IntegrityError(f"the members' states differ after step {step}: {found}")


def _tag(number: int) -> int:
    return number + 2


def _send_header(group: GenerationGroup, header: bytes, newcomers: Sequence[int]) -> None:
    size = torch.tensor([len(header)], dtype=torch.int64)
    content = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for newcomer in newcomers:
        group.start_send(size, newcomer, 0)()
        group.start_send(content, newcomer, 1)()


def _receive_header(group: GenerationGroup, donor: int) -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    group.start_receive(size, donor, 0)()
    content = torch.empty(int(size), dtype=torch.uint8)
    group.start_receive(content, donor, 1)()
    return bytes(content.numpy())


def _pack(views: Sequence[torch.Tensor], chunk: Sequence[Piece]) -> torch.Tensor:
    if len(chunk) == 1:
        index, start, stop = chunk[0]
        return views[index][start:stop]
    return torch.cat([views[index][start:stop] for index, start, stop in chunk])


def _unpack(
    views: Sequence[torch.Tensor],
    wait: Callable[[], None],
    chunk: Sequence[Piece],
    buffer: torch.Tensor,
) -> None:
    wait()
    offset = 0
    for index, start, stop in chunk:
        views[index][start:stop] = buffer[offset : offset + stop - start]
        offset += stop - start
