"""How a model's gradients and buffers lie in flat memory, the same on every member."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tensorforge.errors import InvalidInputError

_ALIGNMENT = 16
"""Elements. Every tensor starts at a multiple of it, so its alignment is the same on any number of workers."""

EntryIndex = tuple[int, int]
"""The number of a group in its layout and of an entry in that group."""

Entries = list[list[torch.Tensor]]
"""For each group of a layout, one tensor per entry."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies: `offset` and `size` count elements within the flat memory of its group."""

    name: str
    shape: torch.Size
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Tensors of one dtype that share a flat memory of `size` elements.

    If `summed`, the values of all shards are added up; otherwise the value of the first shard is taken.
    """

    dtype: torch.dtype
    summed: bool
    entries: tuple[Entry, ...]
    size: int

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The entries of `flat`, in their shapes."""
        return [flat[e.offset : e.offset + e.size].view(e.shape) for e in self.entries]


class _BufferPath:
    """The path of a buffer in the model. Finds the current tensor even if the module has replaced it."""

    def __init__(self, model: nn.Module, name: str) -> None:
        owner, _, self._key = name.rpartition(".")
        self._module = model.get_submodule(owner)

    @property
    def tensor(self) -> torch.Tensor:
        return self._module.get_buffer(self._key)


class FlatLayout:
    """A model's trainable parameters and its buffers, divided into groups.

    Summed groups, one per dtype, hold the gradients of the parameters and the changes of the floating-point
    buffers; those of half-precision tensors are summed in float32. The other groups hold the other buffers
    as they are. `parameters`, `float_buffers` and `other_buffers` are in the model's order, shared tensors
    once, and so are the lists of their entries.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise InvalidInputError("model: it has no parameter that requires a gradient")
        buffers = list(model.named_buffers())
        floats = [(name, buffer) for name, buffer in buffers if buffer.is_floating_point()]
        others = [(name, buffer) for name, buffer in buffers if not buffer.is_floating_point()]
        self.parameters = [parameter for _, parameter in named]
        self.device = self.parameters[0].device
        """Where all parameters and buffers are, and so the flat memory."""
        self.half_precision = [
            number
            for number, parameter in enumerate(self.parameters)
            if _sum_dtype(parameter.dtype) != parameter.dtype
        ]
        """The numbers of the parameters whose gradients are summed in a wider dtype than their own."""
        self._float_buffers = [_BufferPath(model, name) for name, _ in floats]
        self._other_buffers = [_BufferPath(model, name) for name, _ in others]
        self.groups = (*_groups([*named, *floats], summed=True), *_groups(others, summed=False))
        indexes = {
            (entry.name, group.summed): (group_number, entry_number)
            for group_number, group in enumerate(self.groups)
            for entry_number, entry in enumerate(group.entries)
        }
        self.parameter_entries = [indexes[name, True] for name, _ in named]
        self.float_buffer_entries = [indexes[name, True] for name, _ in floats]
        self.other_buffer_entries = [indexes[name, False] for name, _ in others]

    def dtype(self, index: EntryIndex) -> torch.dtype:
        """The dtype in which an entry is summed."""
        return self.groups[index[0]].dtype

    def zeros(self, index: EntryIndex) -> torch.Tensor:
        """A zero of an entry's shape, on the model's device."""
        group = self.groups[index[0]]
        return torch.zeros(group.entries[index[1]].shape, dtype=group.dtype, device=self.device)

    @property
    def float_buffers(self) -> list[torch.Tensor]:
        """The current tensors of the floating-point buffers."""
        return [path.tensor for path in self._float_buffers]

    @property
    def other_buffers(self) -> list[torch.Tensor]:
        """The current tensors of the other buffers."""
        return [path.tensor for path in self._other_buffers]

    def no_entries(self) -> Entries:
        """An empty tensor for every entry, to be replaced."""
        nothing = torch.empty(0)
        return [[nothing] * len(group.entries) for group in self.groups]


def entries_at(values: Entries, indexes: Sequence[EntryIndex]) -> list[torch.Tensor]:
    """The tensors at `indexes`."""
    return [values[group][entry] for group, entry in indexes]


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _groups(named: Sequence[tuple[str, torch.Tensor]], *, summed: bool) -> list[FlatGroup]:
    by_dtype: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        dtype = _sum_dtype(tensor.dtype) if summed else tensor.dtype
        by_dtype.setdefault(dtype, []).append((name, tensor))
    groups = []
    for dtype, members in by_dtype.items():
        entries, offset = [], 0
        for name, tensor in members:
            entries.append(Entry(name, tensor.shape, offset, tensor.numel()))
            offset += -(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT
        groups.append(FlatGroup(dtype, summed, tuple(entries), offset))
    return groups
