"""Sends batches from one process to another with one copy, into memory that both see.

The content of tensors and numpy arrays is written to an anonymous file, and its descriptor is sent with the
message. So it does not count against the size of /dev/shm, and nothing is left when the processes are gone.
Everything else is pickled.
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


def send(connection: socket.socket, thing: Any) -> None:
    """Send anything that can be pickled. For anything else pickle's error is raised before a byte is sent."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=5, buffer_callback=buffers.append).dump(thing)
    arrays = [buffer.raw() for buffer in buffers]
    header = _HEADER.pack(pickled.tell(), len(arrays))
    sizes = struct.pack(f"<{len(arrays)}Q", *(array.nbytes for array in arrays))
    if not arrays:
        connection.sendall(header)
    else:
        memory = os.memfd_create("batch", os.MFD_CLOEXEC)
        try:
            _write(memory, arrays)
            socket.send_fds(connection, [header], [memory])
        finally:
            os.close(memory)
    connection.sendall(sizes)
    connection.sendall(pickled.getbuffer())


def receive(connection: socket.socket) -> Any:
    """Return what the other end sent with `send`; raise `EOFError` if the other end is closed."""
    header, descriptors, _, _ = socket.recv_fds(connection, _HEADER.size, 1)
    try:
        if not header:
            raise EOFError("the other end is closed")
        header += _receive_exactly(connection, _HEADER.size - len(header))
        length, count = _HEADER.unpack(header)
        sizes = struct.unpack(f"<{count}Q", _receive_exactly(connection, 8 * count))
        pickled = _receive_exactly(connection, length)
        if count and not descriptors:
            raise UnavailableError("a batch was lost: this process may not open any more files")
        arrays = _read(descriptors[0], sizes) if count else []
        return pickle.loads(pickled, buffers=arrays)  # noqa: S301  from our own process
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        # torch keeps each sparse tensor that it unpickles in a list until this is called.
        torch._utils._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]  # noqa: SLF001


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
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
    # Unlike Python's `mmap` this keeps no descriptor open, so any number of batches can be alive.
    size = os.fstat(memory).st_size
    name = f"/proc/self/fd/{memory}"
    content = torch.from_file(name, shared=True, size=size, dtype=torch.uint8).numpy().data
    arrays, offset = [], 0
    for size in sizes:
        arrays.append(content[offset : offset + size])
        offset = _aligned(offset + size)
    return arrays


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class _Pickler(pickle.Pickler):
    """Passes the content of plain CPU tensors to `buffer_callback`, as numpy does for its arrays."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not torch.Tensor or not _is_plain(thing):
            return NotImplemented
        # Sums depend on the order in memory. So gaps are sent too, and the strides stay as they are.
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
