"""Batches from one process to another: one copy into memory that both see.

Tensors and numpy arrays lie in an anonymous file whose descriptor travels with the message, so they count
against no limit of a shared memory folder, and nothing of them outlives the processes. Everything else is
pickled.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import struct
from typing import Any

import torch
import torch._utils

from tensorforge.errors import UnavailableError

_HEADER = struct.Struct("<QI")
_ALIGNMENT = 64


def send(end: socket.socket, thing: Any) -> None:
    """Send anything that pickle takes; what it does not take is an error before anything is sent."""
    outside: list[pickle.PickleBuffer] = []
    inside = io.BytesIO()
    _Pickler(inside, protocol=5, buffer_callback=outside.append).dump(thing)
    arrays = [buffer.raw() for buffer in outside]
    head = _HEADER.pack(inside.tell(), len(arrays))
    rest = struct.pack(f"<{len(arrays)}Q", *(array.nbytes for array in arrays))
    if not arrays:
        end.sendall(head)
    else:
        memory = os.memfd_create("batch", os.MFD_CLOEXEC)
        try:
            _write(memory, arrays)
            socket.send_fds(end, [head], [memory])
        finally:
            os.close(memory)
    end.sendall(rest)
    end.sendall(inside.getbuffer())


def receive(end: socket.socket) -> Any:
    """What `send` sent at the other end; `EOFError` if that is closed."""
    head, descriptors, _, _ = socket.recv_fds(end, _HEADER.size, 1)
    try:
        if not head:
            raise EOFError("the other end is closed")
        length, count = _HEADER.unpack(head + _receive_exactly(end, _HEADER.size - len(head)))
        sizes = struct.unpack(f"<{count}Q", _receive_exactly(end, 8 * count))
        pickled = _receive_exactly(end, length)
        if count and not descriptors:
            raise UnavailableError("a batch was lost: this process may not open any more files")
        arrays = _read(descriptors[0], sizes) if count else []
        return pickle.loads(pickled, buffers=arrays)  # noqa: S301  from our own process
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        # torch remembers each sparse tensor that it unpickles, for ever unless this is called.
        torch._utils._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]  # noqa: SLF001


def _receive_exactly(end: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = end.recv_into(view)
        if count == 0:
            raise EOFError("the other end closed in the middle of a message")
        view = view[count:]
    return bytes(data)


def _write(memory: int, arrays: list[memoryview]) -> None:
    offset = 0
    for array in arrays:
        start, left = offset, array
        while left:
            done = os.pwrite(memory, left, start)
            start, left = start + done, left[done:]
        offset = _aligned(offset + array.nbytes)
    os.ftruncate(memory, max(offset, 1))


def _read(memory: int, sizes: tuple[int, ...]) -> list[memoryview]:
    # Unlike Python's `mmap` this keeps no descriptor, so batches can be kept in any number.
    size = os.fstat(memory).st_size
    name = f"/proc/self/fd/{memory}"
    whole = torch.from_file(name, shared=True, size=size, dtype=torch.uint8).numpy().data
    arrays, offset = [], 0
    for size in sizes:
        arrays.append(whole[offset : offset + size])
        offset = _aligned(offset + size)
    return arrays


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class _Pickler(pickle.Pickler):
    """Leaves the bytes of plain CPU tensors to the buffers, as numpy's arrays do by themselves."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not torch.Tensor or not _is_plain(thing):
            return NotImplemented
        # Sums depend on the order in memory: the gaps travel, too, so that the strides stay.
        last = sum((n - 1) * stride for n, stride in zip(thing.shape, thing.stride(), strict=True))
        raw = thing.as_strided((last + 1,), (1,)).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(raw.data), thing.dtype, thing.shape, thing.stride())


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_nested
        and tensor.numel() > 0
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _tensor(
    raw: memoryview, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
) -> torch.Tensor:
    return torch.frombuffer(raw, dtype=dtype).as_strided(shape, stride)
