"""Local boxes of tensors: which indices of a tensor, `TensorShard` or DTensor are in this rank's memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from tensorforge.checkpoint.format.boxes import Box, Shape
from tensorforge.checkpoint.format.formats import TORCH_NAMES
from tensorforge.errors import InvalidInputError

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_Range = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """A box of a larger tensor, in the memory of this rank; put it into a state dict in place of the tensor."""

    tensor: torch.Tensor
    offset: Shape
    global_shape: Shape

    def __post_init__(self) -> None:
        box = Box(tuple(self.offset), tuple(self.tensor.shape))
        if not Box.full(tuple(self.global_shape)).contains(box):
            raise InvalidInputError(f"{box} is outside of shape {tuple(self.global_shape)}")


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """Tensor name → the dimension along which the ranks divide it; tensors without an entry are replicated.

    The division is that of `torch.chunk`: equal sizes, except that the last ranks get less or nothing.
    """

    dimensions: dict[str, int]

    def local(self, name: str, tensor: torch.Tensor, rank: int, world_size: int) -> Any:
        """The box of a complete tensor that belongs to `rank`, or the tensor itself if it is replicated."""
        dimension = self.dimensions.get(name)
        if dimension is None:
            return tensor
        start, stop = rank_range(tensor.shape[dimension], rank, world_size)
        local = tensor.narrow(dimension, start, stop - start).contiguous()
        offset = tuple(start if index == dimension else 0 for index in range(tensor.ndim))
        return TensorShard(local, offset, tuple(tensor.shape))


def rank_range(extent: int, rank: int, world_size: int) -> tuple[int, int]:
    """The range of indices that `torch.chunk` gives to `rank`."""
    step = -(-extent // world_size)
    return min(rank * step, extent), min((rank + 1) * step, extent)


@dataclass(frozen=True, slots=True, eq=False)
class LocalTensor:
    """A tensor as this rank has it: element type, global shape, and its local boxes with their memory."""

    dtype: str
    shape: Shape
    boxes: tuple[tuple[Box, torch.Tensor], ...]

    def memory(self) -> object:
        """A key that is equal for two views of the same memory; `None` for a tensor without elements here."""
        if not self.boxes or not all(tensor.numel() for _, tensor in self.boxes):
            return None
        views = tuple(
            (box, tensor.device, tensor.data_ptr(), tensor.stride()) for box, tensor in self.boxes
        )
        return self.dtype, self.shape, views


def is_tensor(value: object) -> bool:
    """Whether `describe` accepts the value."""
    return isinstance(value, (torch.Tensor, TensorShard))


def describe(value: torch.Tensor | TensorShard, where: str) -> LocalTensor:
    """The local boxes of a tensor, without copying. `where` names the tensor in errors."""
    if isinstance(value, TensorShard):
        tensor = _plain(value.tensor, where)
        box = Box(tuple(value.offset), tuple(tensor.shape))
        return LocalTensor(dtype_name(tensor, where), tuple(value.global_shape), ((box, tensor),))
    if isinstance(value, DTensor):
        return _describe_dtensor(value, where)
    tensor = _plain(value, where)
    shape = tuple(tensor.shape)
    return LocalTensor(dtype_name(tensor, where), shape, ((Box.full(shape), tensor),))


def dtype_name(tensor: torch.Tensor, where: str) -> str:
    """The name of a tensor's element type in manifests."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise InvalidInputError(f"{where} is {tensor.dtype}, which checkpoints cannot store")
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
    ranges: list[list[_Range]] = [[(0, extent)] for extent in shape]
    for mesh_dimension, placement in enumerate(value.placements):
        if isinstance(placement, Replicate):
            continue
        dimension = getattr(placement, "dim", None)
        if dimension is None:
            raise InvalidInputError(f"{where} has placement {placement}: reduce it before saving")
        ranges[dimension] = _shard_ranges(
            ranges[dimension],
            placement,
            coordinate[mesh_dimension],
            value.device_mesh.size(mesh_dimension),
        )
    return LocalTensor(dtype_name(local, where), shape, tuple(_boxes(local, ranges)))


def _shard_ranges(
    ranges: list[_Range], placement: Any, coordinate: int, mesh_size: int
) -> list[_Range]:
    """The subset of `ranges` (of global indices) that a placement leaves to one mesh coordinate."""
    extent = sum(stop - start for start, stop in ranges)
    if isinstance(placement, Shard):
        kept = [rank_range(extent, coordinate, mesh_size)]
    else:
        # Interleaved shards: let the placement itself divide the indices.
        indices, _ = placement._split_tensor(  # noqa: SLF001  the only definition there is
            torch.arange(extent), mesh_size, with_padding=False
        )
        kept = _consecutive(indices[coordinate].tolist())
    return [each for start, stop in kept for each in _subranges(ranges, start, stop)]


def _consecutive(indices: list[int]) -> list[_Range]:
    ranges: list[_Range] = []
    for index in indices:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return ranges


def _subranges(ranges: list[_Range], start: int, stop: int) -> list[_Range]:
    """The indices number `start` to `stop` of all indices in `ranges`."""
    kept, position = [], 0
    for low, high in ranges:
        begin, end = max(start - position, 0), min(stop - position, high - low)
        if begin < end:
            kept.append((low + begin, low + end))
        position += high - low
    return kept


def _boxes(local: torch.Tensor, ranges: list[list[_Range]]) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of the product of the ranges of all dimensions, each with its view of the local tensor."""
    dimensions = []
    for kept in ranges:
        positions = itertools.accumulate((stop - start for start, stop in kept), initial=0)
        dimensions.append(list(zip(kept, positions, strict=False)))
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
    """The memory of a contiguous tensor on the CPU as bytes, not copied."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is contiguous and on the CPU, otherwise a copy that is."""
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def is_direct(tensor: torch.Tensor) -> bool:
    """Whether a reader may write bytes directly into the memory of the tensor."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()
