"""Tensors as boxes of bytes: plain ones, parts of one that the caller describes, and DTensor."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from tensorforge.checkpoint.format.boxes import Box, Shape
from tensorforge.checkpoint.format.dtypes import TORCH_NAMES
from tensorforge.errors import InvalidInputError

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """The part of a larger tensor that lies on this rank: put it into a state dict in the tensor's place."""

    tensor: torch.Tensor
    offset: Shape
    global_shape: Shape

    def __post_init__(self) -> None:
        box = Box(tuple(self.offset), tuple(self.tensor.shape))
        if not Box.whole(tuple(self.global_shape)).contains(box):
            raise InvalidInputError(f"{box} lies outside of shape {tuple(self.global_shape)}")


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """Which dimension of which tensor is cut; what is not named is replicated.

    Cut like `torch.chunk`: the first ranks get the larger parts, the last may get none.
    """

    dimensions: dict[str, int]

    def local(self, name: str, tensor: torch.Tensor, rank: int, world_size: int) -> Any:
        """The part of a whole tensor that belongs to `rank`, or the tensor itself if it is not cut."""
        dimension = self.dimensions.get(name)
        if dimension is None:
            return tensor
        start, stop = chunk_range(tensor.shape[dimension], rank, world_size)
        part = tensor.narrow(dimension, start, stop - start).contiguous()
        offset = tuple(start if index == dimension else 0 for index in range(tensor.ndim))
        return TensorShard(part, offset, tuple(tensor.shape))


def chunk_range(extent: int, index: int, parts: int) -> tuple[int, int]:
    """The range that `torch.chunk` gives to part `index` of `parts`."""
    step = -(-extent // parts)
    return min(index * step, extent), min((index + 1) * step, extent)


@dataclass(frozen=True, slots=True, eq=False)
class LocalTensor:
    """What a rank holds of a tensor: its type, its whole shape, and boxes with the memory behind each."""

    dtype: str
    shape: Shape
    parts: tuple[tuple[Box, torch.Tensor], ...]

    def memory(self) -> object:
        """Equal for two tensors that are the same memory seen in the same way; `None` if there is none."""
        if not self.parts or not all(tensor.numel() for _, tensor in self.parts):
            return None
        views = tuple(
            (box, tensor.device, tensor.data_ptr(), tensor.stride()) for box, tensor in self.parts
        )
        return self.dtype, self.shape, views


def is_tensor(value: object) -> bool:
    """Whether the value is something that `describe` describes."""
    return isinstance(value, (torch.Tensor, TensorShard))


def describe(value: torch.Tensor | TensorShard, where: str) -> LocalTensor:
    """What this rank holds of a tensor. The memory is the tensor's own."""
    if isinstance(value, TensorShard):
        tensor = _plain(value.tensor, where)
        box = Box(tuple(value.offset), tuple(tensor.shape))
        return LocalTensor(dtype_name(tensor, where), tuple(value.global_shape), ((box, tensor),))
    if isinstance(value, DTensor):
        return _describe_dtensor(value, where)
    tensor = _plain(value, where)
    shape = tuple(tensor.shape)
    return LocalTensor(dtype_name(tensor, where), shape, ((Box.whole(shape), tensor),))


def dtype_name(tensor: torch.Tensor, where: str) -> str:
    """Our name for a tensor's type."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise InvalidInputError(f"{where} is {tensor.dtype}, which checkpoints cannot hold")
    return name


def _plain(tensor: torch.Tensor, where: str) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise InvalidInputError(f"{where} is sparse, quantized or on the meta device")
    return tensor.detach()


def _describe_dtensor(value: DTensor, where: str) -> LocalTensor:
    shape = tuple(value.shape)
    local = _plain(value.to_local(), where)
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return LocalTensor(dtype_name(local, where), shape, ())
    runs: list[list[tuple[int, int]]] = [[(0, extent)] for extent in shape]
    for mesh_dimension, placement in enumerate(value.placements):
        if isinstance(placement, Replicate):
            continue
        dimension = getattr(placement, "dim", None)
        if dimension is None:
            raise InvalidInputError(f"{where} has placement {placement}: reduce it before saving")
        runs[dimension] = _shard_runs(
            runs[dimension],
            placement,
            coordinate[mesh_dimension],
            value.device_mesh.size(mesh_dimension),
        )
    return LocalTensor(dtype_name(local, where), shape, tuple(_boxes(local, runs)))


def _shard_runs(
    runs: list[tuple[int, int]], placement: Any, index: int, parts: int
) -> list[tuple[int, int]]:
    """The ranges of global indices that remain of `runs` after one more cut."""
    extent = sum(stop - start for start, stop in runs)
    if isinstance(placement, Shard):
        kept = [chunk_range(extent, index, parts)]
    else:
        # Interleaved: ask the placement itself, on the indices.
        pieces, _ = placement._split_tensor(  # noqa: SLF001  the only definition there is
            torch.arange(extent), parts, with_padding=False
        )
        kept = _consecutive(pieces[index].tolist())
    return [piece for start, stop in kept for piece in _slice_runs(runs, start, stop)]


def _consecutive(indices: list[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return ranges


def _slice_runs(runs: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    kept, position = [], 0
    for low, high in runs:
        begin, end = max(start - position, 0), min(stop - position, high - low)
        if begin < end:
            kept.append((low + begin, low + end))
        position += high - low
    return kept


def _boxes(
    local: torch.Tensor, runs: list[list[tuple[int, int]]]
) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of the product of the ranges, each with its part of the local tensor."""
    dimensions = []
    for ranges in runs:
        positions = itertools.accumulate((stop - start for start, stop in ranges), initial=0)
        dimensions.append(list(zip(ranges, positions, strict=False)))
    found = []
    for combination in itertools.product(*dimensions):
        box = Box(
            tuple(start for (start, _), _ in combination),
            tuple(stop - start for (start, stop), _ in combination),
        )
        index = tuple(slice(at, at + stop - start) for (start, stop), at in combination)
        found.append((box, local[index] if index else local))
    return found


def byte_view(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a contiguous tensor on the CPU, as its memory, not a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is contiguous and on the CPU, otherwise a copy that is."""
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def is_direct(tensor: torch.Tensor) -> bool:
    """Whether bytes may be read straight into the tensor's memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()
