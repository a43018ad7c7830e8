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

    def pack(self, tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """Copy `tensors`, one per entry, to their places."""
        for view, tensor in zip(self.views(flat), tensors, strict=True):
            view.copy_(tensor)


class _Place:
    """Where a module keeps a buffer."""

    def __init__(self, model: nn.Module, name: str) -> None:
        owner, _, self._key = name.rpartition(".")
        self._module = model.get_submodule(owner)

    @property
    def tensor(self) -> torch.Tensor:
        return self._module.get_buffer(self._key)


class Layout:
    """A model's trainable parameters and its buffers, divided into groups.

    `parameters` and `buffers` are in the model's order, shared ones once. `groups` hold the parameters'
    gradients and the changes of floating-point buffers, by type, and the other buffers as they are.
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

    @property
    def moving(self) -> list[torch.Tensor]:
        """The floating-point buffers, as they are now: a module may have replaced the tensor."""
        return [place.tensor for place in self._moving]

    @property
    def fixed(self) -> list[torch.Tensor]:
        """The other buffers, as they are now."""
        return [place.tensor for place in self._fixed]

    def split(self, summed: Sequence[torch.Tensor], taken: Sequence[torch.Tensor]) -> Split:
        """Sort tensors in the order of `parameters + moving` and `fixed` into the groups."""
        sorted_by_type: dict[tuple[torch.dtype, bool], list[torch.Tensor]] = {}
        for tensors, kind in ((summed, True), (taken, False)):
            for tensor in tensors:
                sorted_by_type.setdefault((tensor.dtype, kind), []).append(tensor)
        return [sorted_by_type[group.dtype, group.summed] for group in self.groups]

    def join(self, split: Split) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The inverse of `split`."""
        queues = {
            (g.dtype, g.summed): iter(part) for g, part in zip(self.groups, split, strict=True)
        }
        summed = [next(queues[t.dtype, True]) for t in (*self.parameters, *self.moving)]
        taken = [next(queues[t.dtype, False]) for t in self.fixed]
        return summed, taken


Split = list[list[torch.Tensor]]
"""For each group of a layout, one tensor per entry."""


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
