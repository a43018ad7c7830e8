"""Host memory between a device and what cannot read the device: reused, pinned where the device allows it.

A copy between pinned memory and a device is done later, by a stream. So each lent buffer keeps the event after
which its memory may be used, and nobody uses the memory before that event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

PIECE_BYTES = 8 << 20
"""How much of a tensor is staged at once."""
_CLASS_BYTES = 64 << 10
"""Buffer sizes are powers of two from here on, so that buffers of similar size are used again."""


class HostBuffer:
    """Bytes of host memory, lent by `HostStaging`."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.copied: torch.Event | None = None
        """Recorded after the last copy from or to this memory."""

    def view(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `size` elements of this dtype."""
        return self.memory[: size * dtype.itemsize].view(dtype)

    def wait(self) -> None:
        """Wait until the last copy is done; the host may use the memory then."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None

    @property
    def is_idle(self) -> bool:
        """Whether no copy uses the memory any more."""
        return self.copied is None or self.copied.query()


class HostStaging:
    """Lends host buffers for copies from and to one device. One thread at a time uses it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[int, list[HostBuffer]] = {}

    def stage(self, tensor: torch.Tensor) -> HostBuffer:
        """Begin to copy a contiguous tensor of the device into a buffer, after the current stream's work."""
        buffer = self.lend(tensor.numel() * tensor.dtype.itemsize)
        buffer.view(tensor.numel(), tensor.dtype).copy_(tensor.view(-1), non_blocking=True)
        self.mark(buffer)
        return buffer

    def unstage(self, buffer: HostBuffer, into: torch.Tensor) -> None:
        """Copy the buffer's content to a contiguous tensor of the device, on its current stream; then take
        the buffer back."""
        into.view(-1).copy_(buffer.view(into.numel(), into.dtype), non_blocking=True)
        self.mark(buffer)
        self.give_back(buffer)

    def mark(self, buffer: HostBuffer) -> None:
        """Note that the device's current stream uses the buffer up to here."""
        buffer.copied = torch.accelerator.current_stream(self.device).record_event()

    def lend(self, size: int) -> HostBuffer:
        """A buffer of at least `size` bytes with arbitrary content, which no copy uses any more."""
        rounded = max(_CLASS_BYTES, 1 << (size - 1).bit_length())
        free = self._free.setdefault(rounded, [])
        for number, buffer in enumerate(free):
            if buffer.is_idle:
                buffer.copied = None
                return free.pop(number)
        return HostBuffer(_host_memory(rounded))

    def give_back(self, buffer: HostBuffer) -> None:
        """Take a buffer back; its memory is lent again once its last copy is done."""
        self._free.setdefault(buffer.memory.numel(), []).append(buffer)


def host_pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of a tensor in host memory, piece by piece; a piece is valid until the next one is asked for.

    A tensor of the CPU is one piece and shares its memory, if it is contiguous. Of a device's tensor the next
    piece is being copied while a piece is used.
    """
    content = flat_bytes(tensor)
    if content.device.type == "cpu":
        yield content
        return
    staging = HostStaging(content.device)
    upcoming: deque[HostBuffer] = deque()
    pieces = torch.split(content, PIECE_BYTES) if content.numel() else ()
    for number, piece in enumerate(pieces):
        upcoming.extend(staging.stage(each) for each in pieces[number + len(upcoming) : number + 2])
        staged = upcoming.popleft()
        staged.wait()
        yield staged.view(piece.numel(), torch.uint8)
        staging.give_back(staged)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a flat uint8 tensor on its device; shares memory if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _host_memory(size: int) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # the device or the system has no pinned memory (left)
        return torch.empty(size, dtype=torch.uint8)
