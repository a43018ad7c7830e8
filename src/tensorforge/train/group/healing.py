"""Bringing newcomers to the others' state: raw tensors from several donors at once, then a digest.

The state goes over in rounds of one chunk. Each donor sends its own part of the chunk to every newcomer, so
the donors share the work evenly and no disk is involved. Everything runs inside the new generation's group:
if somebody dies meanwhile, all of it is aborted and done again by the next generation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from tensorforge.errors import IntegrityError
from tensorforge.train.group.gloo_group import GenerationGroup
from tensorforge.train.loop.flat_state import FlatState, empty_like_header, tensor_bytes

CHUNK_BYTES = 8 << 20
_IN_FLIGHT = 2

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
    group.gather_bytes(state.header() if group.rank == donors[0] else b"")
    views = [tensor_bytes(tensor) for tensor in state.tensors]
    place, sent = donors.index(group.rank), 0
    window: deque[Callable[[], None]] = deque()
    for chunk in chunks([view.numel() for view in views]):
        packed = _pack(views, chunk)
        bounds = _bounds(packed.numel(), len(donors))
        part = packed[bounds[place] : bounds[place + 1]]
        outgoing = part if len(newcomers) == 1 else part.repeat(len(newcomers))
        sizes = [part.numel() if rank in newcomers else 0 for rank in range(group.world_size)]
        nothing = torch.empty(0, dtype=torch.uint8)
        window.append(group.start_all_to_all(nothing, outgoing, [0] * group.world_size, sizes))
        sent += outgoing.numel()
        if len(window) > _IN_FLIGHT:
            window.popleft()()
    for wait in window:
        wait()
    return sent


def receive(group: GenerationGroup, donors: Sequence[int]) -> tuple[FlatState, int]:
    """The donors' state and how many bytes came."""
    state = empty_like_header(group.gather_bytes(b"")[donors[0]])
    views = [tensor.reshape(-1).view(torch.uint8) for tensor in state.tensors]
    window: deque[tuple[Callable[[], None], list[Piece], torch.Tensor]] = deque()
    received = 0
    nothing = torch.empty(0, dtype=torch.uint8)
    for chunk in chunks([view.numel() for view in views]):
        buffer = torch.empty(sum(stop - start for _, start, stop in chunk), dtype=torch.uint8)
        bounds = _bounds(buffer.numel(), len(donors))
        sizes = [0] * group.world_size
        for place, donor in enumerate(donors):
            sizes[donor] = bounds[place + 1] - bounds[place]
        wait = group.start_all_to_all(buffer, nothing, sizes, [0] * group.world_size)
        window.append((wait, chunk, buffer))
        received += buffer.numel()
        if len(window) > _IN_FLIGHT:
            _unpack(views, *window.popleft())
    for waiting in window:
        _unpack(views, *waiting)
    return state, received


def _bounds(size: int, parts: int) -> list[int]:
    return [size * part // parts for part in range(parts + 1)]


def require_equal(digests: Sequence[bytes], step: int) -> None:
    """Raise `IntegrityError` unless all members have the same state."""
    if len(set(digests)) > 1:
        found = ", ".join(f"rank {rank}: {d.hex()[:12]}" for rank, d in enumerate(digests))
        raise IntegrityError(f"the members' states differ after step {step}: {found}")


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
