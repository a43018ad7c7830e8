"""How a model's gradients and buffers lie in flat memory, the same on every member."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tensorforge.errors import InvalidInputError

_ALIGNMENT = 16
"""Elements: every tensor starts at a multiple, so that it is aligned alike on any number of workers."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's place: `offset` and `size` count elements within the flat memory of its group."""

    name: str
    shape: torch.Size
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one type that travel together. `summed`: added up; otherwise the first shard's are taken."""

    dtype: torch.dtype
    summed: bool
    entries: tuple[Entry, ...]
    size: int

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The entries of `flat`, in their shapes."""
        return [flat[e.offset : e.offset + e.size].view(e.shape) for e in self.entries]


class _Place:
    """Where a module keeps a buffer."""

    def __init__(self, model: nn.Module, name: str) -> None:
        owner, _, self._key = name.rpartition(".")
        self._module = model.get_submodule(owner)

    @property
    def tensor(self) -> torch.Tensor:
        return self._module.get_buffer(self._key)


EntryPlace = tuple[int, int]
"""The number of a group and of an entry in it."""


class Layout:
    """A model's trainable parameters and its buffers, divided into groups.

    `parameters`, `moving` and `fixed` are in the model's order, shared ones once, and so are their places.
    `groups` hold the parameters' gradients and the changes of floating-point buffers, by type, and the other
    buffers as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise InvalidInputError("model: it has no parameter that requires a gradient")
        buffers = list(model.named_buffers())
        moving = [(name, buffer) for name, buffer in buffers if buffer.is_floating_point()]
        fixed = [(name, buffer) for name, buffer in buffers if not buffer.is_floating_point()]
        self.parameters = [parameter for _, parameter in named]
        self._moving = [_Place(model, name) for name, _ in moving]
        self._fixed = [_Place(model, name) for name, _ in fixed]
        self.groups = (*_groups([*named, *moving], summed=True), *_groups(fixed, summed=False))
        places = {
            (entry.name, group.summed): (number, place)
            for number, group in enumerate(self.groups)
            for place, entry in enumerate(group.entries)
        }
        self.parameter_places = [places[name, True] for name, _ in named]
        self.moving_places = [places[name, True] for name, _ in moving]
        self.fixed_places = [places[name, False] for name, _ in fixed]

    @property
    def moving(self) -> list[torch.Tensor]:
        """The floating-point buffers, as they are now: a module may have replaced the tensor."""
        return [place.tensor for place in self._moving]

    @property
    def fixed(self) -> list[torch.Tensor]:
        """The other buffers, as they are now."""
        return [place.tensor for place in self._fixed]

    def no_entries(self) -> Entries:
        """A place for every entry, with nothing in it yet."""
        nothing = torch.empty(0)
        return [[nothing] * len(group.entries) for group in self.groups]


Entries = list[list[torch.Tensor]]
"""For each group of a layout, one tensor per entry."""


def entries_at(values: Entries, places: Sequence[EntryPlace]) -> list[torch.Tensor]:
    """The tensors at `places`."""
    return [values[group][entry] for group, entry in places]


def _groups(named: Sequence[tuple[str, torch.Tensor]], *, summed: bool) -> list[Group]:
    by_type: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        by_type.setdefault(tensor.dtype, []).append((name, tensor))
    groups = []
    for dtype, members in by_type.items():
        entries, offset = [], 0
        for name, tensor in members:
            entries.append(Entry(name, tensor.shape, offset, tensor.numel()))
            offset += -(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT
        groups.append(Group(dtype, summed, tuple(entries), offset))
    return groups
